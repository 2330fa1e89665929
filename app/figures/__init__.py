"""Data of pages, and figures as functions of that data, without Streamlit; worker processes compute the data."""
