"""Data of pages, computed from the text of a scenario in a separate process: plain records, without Streamlit."""
