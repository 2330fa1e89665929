"""Figures as pure functions of data: a record of what is drawn, and a function from it to a Plotly figure."""
