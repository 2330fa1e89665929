"""What all figures have in common."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from app.palette import GRID

__all__ = ["empty", "styled"]


def styled(figure: go.Figure, *, height: int, **layout: Any) -> go.Figure:
    """A figure with our margins, legend and grid; colours of text and paper are the theme's.

    Args:
        figure: What is changed.
        height: Pixels.
        layout: More of Plotly's layout.
    """
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 28, "b": 8},
        legend={
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
            "font": {"size": 11},
            "itemwidth": 30,
        },
        hoverlabel={"align": "left"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    figure.update_layout(**layout)
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True)
    return figure


def empty(text: str, *, height: int = 160) -> go.Figure:
    """A figure that says why there is nothing to draw."""
    figure = go.Figure()
    figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    styled(figure, height=height)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure
