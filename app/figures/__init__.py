"""Figures as pure functions of data: records, and functions from records to Plotly figures."""
