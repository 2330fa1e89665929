"""Style and builders of all figures, as plain dictionaries in Plotly's format.

Plotly's Python objects validate every value whenever a figure is built, which took half of the time of a page. The
tests validate the figures with the same objects instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from simplan.explain.charts import STEP_PARTS
from simplan.program.program import MemoryCategory
from simplan.report.drawings.svg import PART_COLOURS

MEMORY: Mapping[MemoryCategory, str] = {
    category: PART_COLOURS[words]
    for category in MemoryCategory
    if (words := str(category).replace("_", " ")) in PART_COLOURS
}
"""Memory categories on a device, in the order of the stack."""

SPLIT: Mapping[str, str] = {part: PART_COLOURS[part] for part in STEP_PARTS}
"""Parts of a rank's step."""

COMMUNICATION = SPLIT["exposed communication"]

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
_HATCHED = {"pattern": {"shape": "/", "size": 5, "solidity": 0.25}}
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
            **{name: _axis(settings) for name, settings in ({"xaxis": {}, "yaxis": {}} | axes).items()},
        },
    }


def _axis(settings: dict[str, Any]) -> dict[str, Any]:
    return _AXIS | settings | ({"title": {"text": settings["title"]}} if "title" in settings else {})


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


def upright(x: float, line: dict[str, Any]) -> dict[str, Any]:
    """A line over the whole height of a figure, for ``shapes``; for arguments see ``across``."""
    return {"type": "line", "yref": "y domain", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line}


def stack(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    tooltips: Mapping[str, Sequence[str]],
    *,
    horizontal: bool = False,
) -> list[dict[str, Any]]:
    """Traces of stacked bars: one per part that is not zero in all bars, hatched for a part without a color.

    Args:
        names: Names of the bars.
        parts: Lengths by part, in the order of the stack, (bars,) each.
        tooltips: Tooltips by part, (bars,) each.
        horizontal: Draw from left to right.
    """
    length, place = ("x", "y") if horizontal else ("y", "x")
    return [
        bar(
            name=part,
            **{place: list(names), length: list(lengths)},
            **({"orientation": "h"} if horizontal else {}),
            marker={"color": PART_COLOURS.get(part, MUTED), "line": {"width": 0}}
            | ({} if part in PART_COLOURS else _HATCHED),
            customdata=[[tooltip] for tooltip in tooltips[part]],
            hovertemplate=f"<b>{part}</b> %{{customdata[0]}}<extra>%{{{place}}}</extra>",
        )
        for part, lengths in parts.items()
        if any(lengths)
    ]


def labeled_bars(
    names: Sequence[str],
    lengths: Sequence[float],
    texts: Sequence[str],
    tooltips: Sequence[str],
    title: str,
    *,
    color: str | Sequence[str] = PLANS[0],
    room: float = 1.25,
    **layout: Any,
) -> Figure:
    """Horizontal bars with a text at the end of each, the first on top.

    Args:
        names, lengths, texts, tooltips: One per bar.
        title: Title of the axis.
        color: Color of the bars, or one per bar.
        room: Length of the axis over that of the longest bar, for the texts.
        layout: Further layout, as of ``figure``.
    """
    bars = bar(
        orientation="h",
        x=list(lengths),
        y=[f"{name} " for name in names],
        text=list(texts),
        textposition="outside",
        cliponaxis=False,
        marker={"color": color, "line": {"width": 0}},
        customdata=[[tooltip] for tooltip in tooltips],
        hovertemplate="%{customdata[0]}<extra></extra>",
    )
    axis = {"title": title, "range": [0, room * max(lengths)]}
    defaults: dict[str, Any] = {"height": 80 + 32 * len(names), "bargap": 0.3, "xaxis": axis, "yaxis": CATEGORIES}
    return figure([bars], **(defaults | layout))


def numbered(name: str, number: int) -> str:
    """Plotly's name for an axis of the n-th panel: ``x``, ``x2``; ``yaxis``, ``yaxis2``."""
    return name if number == 1 else f"{name}{number}"


def empty(text: str) -> Figure:
    """A figure with the reason why there is nothing to draw."""
    note = {"text": text, "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    hidden = {"visible": False}
    return figure([], height=160, annotations=[note], xaxis=hidden, yaxis=hidden)
