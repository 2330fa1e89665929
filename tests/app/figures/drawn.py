"""Figures as Plotly's own objects, which check every value of them."""

from __future__ import annotations

import plotly.graph_objects as go

from app.figures.style import Figure


def checked(figure: Figure) -> go.Figure:
    """The figure, if Plotly knows all that it says.

    Raises:
        ValueError: It does not.
    """
    return go.Figure(figure)
