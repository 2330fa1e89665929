"""Data of pages, computed from the text of a scenario in a worker process: plain records, without Streamlit.

Functions of a scenario raise a SpecError if the scenario is wrong, or if the cost model has no estimate for the plan.
"""
