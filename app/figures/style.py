"""Style and builders of all figures, as plain dictionaries in Plotly's format.

Plotly's Python objects validate every value whenever a figure is built, which took half of the time of a page. The
tests validate the figures with the same objects instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from app.palette import GRID, MUTED, PLANS

__all__ = ["Figure", "across", "bar", "empty", "figure", "numbered", "scatter"]

Figure: TypeAlias = dict[str, Any]
"""``data``, ``layout`` and, for animations, ``frames``, as in https://plotly.com/javascript/reference."""

_CLEAR = "rgba(0,0,0,0)"
_AXIS = {"gridcolor": GRID, "zeroline": False, "automargin": True}
_LEGEND = {
    "orientation": "h",
    "y": 1.0,
    "yanchor": "bottom",
    "x": 0,
    "xanchor": "left",
    "traceorder": "normal",
    "font": {"size": 11},
    "itemwidth": 30,
}
_MARGIN = {"l": 8, "r": 8, "t": 28, "b": 8}


def figure(traces: Iterable[dict[str, Any]], *, height: int, **layout: Any) -> Figure:
    """A figure with the dashboard's margins, legend and grid; the theme defines colors of text and background.

    Args:
        traces: Traces from ``bar`` and ``scatter``, or in Plotly's format.
        height: Height in pixels.
        layout: Further layout of Plotly. Axes, legend and margin are merged with the defaults; axis titles are strings.
    """
    axes = {name: layout.pop(name) for name in list(layout) if name.startswith(("xaxis", "yaxis"))}
    return {
        "data": list(traces),
        "layout": {
            "height": height,
            "margin": _MARGIN | layout.pop("margin", {}),
            "legend": _LEGEND | layout.pop("legend", {}),
            "hoverlabel": {"align": "left"},
            "modebar": {"bgcolor": _CLEAR, "color": MUTED, "activecolor": PLANS[0]},
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            **layout,
            **{name: _axis(own) for name, own in ({"xaxis": {}, "yaxis": {}} | axes).items()},
        },
    }


def _axis(own: dict[str, Any]) -> dict[str, Any]:
    return _AXIS | own | ({"title": {"text": own["title"]}} if "title" in own else {})


def bar(**values: Any) -> dict[str, Any]:
    """A trace of bars."""
    return {"type": "bar", **values}


def scatter(**values: Any) -> dict[str, Any]:
    """A trace of points or lines."""
    return {"type": "scatter", **values}


def across(y: float, line: dict[str, Any], *, yaxis: str = "y") -> dict[str, Any]:
    """A line over the whole width of a panel, for ``shapes``.

    Args:
        y: Value on the panel's y axis.
        line: Color, width and dash of the line.
        yaxis: Y axis of the panel, on the first x axis.
    """
    ends = {"x0": 0, "x1": 1, "y0": y, "y1": y}
    return {"type": "line", "xref": "x domain", "yref": yaxis, "line": line, **ends}


def numbered(name: str, number: int) -> str:
    """Plotly's name for an axis of the n-th panel: ``x``, ``x2``; ``yaxis``, ``yaxis2``."""
    return name if number == 1 else f"{name}{number}"


def empty(text: str) -> Figure:
    """A figure with the reason why there is nothing to draw."""
    note = {"text": text, "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    hidden = {"visible": False}
    return figure([], height=160, annotations=[note], xaxis=hidden, yaxis=hidden)
