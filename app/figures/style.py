"""Style and builders of all figures, as plain dictionaries in Plotly's format.

Plotly's Python objects validate every value whenever a figure is built, which took half of the time of a page. The
tests validate the figures with the same objects instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from simplan.program.action import ActionKind
from simplan.program.program import MemoryCategory

MEMORY: Mapping[MemoryCategory, str] = {
    MemoryCategory.PARAMETERS: "#4ea5b7",  # four colors as in the Ultra-Scale Playbook
    MemoryCategory.GRADIENTS: "#e889ab",
    MemoryCategory.OPTIMIZER: "#cec0fa",
    MemoryCategory.ACTIVATIONS: "#e38a42",
    MemoryCategory.GATHERED: "#2f6f86",
    MemoryCategory.BUFFERS: "#7a1f4b",
    MemoryCategory.LOGITS: "#f2c14e",
    MemoryCategory.WORKSPACE: "#565f6a",
    MemoryCategory.CONTEXT: "#d9dde2",
}
"""Memory categories on a device, in the order of the stack."""

ACTIONS: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "#3b7dd8",
    ActionKind.BACKWARD: "#e5892b",
    ActionKind.BACKWARD_INPUT: "#1abc9c",
    ActionKind.BACKWARD_WEIGHT: "#3a7d2c",
    ActionKind.UNSHARD: "#a79bc9",
    ActionKind.REDUCE_GRAD: "#a79bc9",
    ActionKind.OPTIM: "#6b7078",
}
COMMUNICATION = "#8c7aa9"

SPLIT: Mapping[str, str] = {
    "compute": "#3b7dd8",
    "recompute": "#9cc2f0",
    "exposed communication": COMMUNICATION,
    "wait": "#d5d9df",
    "host": "#c8a24a",
    "optimizer": "#565d66",
}
"""Parts of a rank's step."""

PLANS = ("#3b7dd8", "#e5892b", "#3fc9b8", "#c2548a", "#a79bc9", "#4a525c")
"""One after the other, for things of one kind: plans, sources, schedules."""

CAPACITY = {"color": "#d1495b", "width": 1.5, "dash": "dash"}
"""Line at the memory of a device."""

CATEGORIES = {"autorange": "reversed", "type": "category", "showgrid": False}
"""Y axis of horizontal bars, the first on top."""

MUTED, GRID = "#8a8f98", "rgba(128,136,148,0.25)"


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


def time_unit(seconds: float) -> tuple[str, float]:
    """Unit of a time axis, and the unit in seconds."""
    return ("s", 1.0) if seconds >= 1.0 else ("ms", 1e-3)


def numbered(name: str, number: int) -> str:
    """Plotly's name for an axis of the n-th panel: ``x``, ``x2``; ``yaxis``, ``yaxis2``."""
    return name if number == 1 else f"{name}{number}"


def empty(text: str) -> Figure:
    """A figure with the reason why there is nothing to draw."""
    note = {"text": text, "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    hidden = {"visible": False}
    return figure([], height=160, annotations=[note], xaxis=hidden, yaxis=hidden)
