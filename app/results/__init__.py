"""What pages show, computed from the text of a scenario in a process of its own: plain records, without Streamlit."""
