"""Where a rank's step goes: its shares as steps down from the first start to the last end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.figures.style import Figure, bar, figure
from app.palette import MUTED, SPLIT
from app.results.plan import StepPart
from simplan.units import format_percent, format_time

__all__ = ["waterfall_figure"]

_HATCHED = ("recompute", "exposed communication")
_HATCH = {"shape": "/", "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.6)", "size": 6, "solidity": 0.2}


def waterfall_figure(parts: Sequence[StepPart], step_time_s: float) -> Figure:
    """A bar for each share, each beginning where the one before ends, and the step below.

    Args:
        parts: From ``step_parts``; they sum to the step.
        step_time_s: The step.
    """
    unit, unit_s = ("s", 1.0) if step_time_s >= 1.0 else ("ms", 1e-3)
    bars, start_s = [], 0.0
    for part in parts:
        label = f"{part.name}  <b>{format_time(part.seconds)}</b>  {format_percent(part.seconds / step_time_s)}"
        look = {"color": SPLIT[part.group]} | ({"pattern": _HATCH} if part.group in _HATCHED else {})
        bars.append(_bar(label, start_s / unit_s, part.seconds / unit_s, look, part.group))
        start_s += part.seconds
    step = f"step  <b>{format_time(step_time_s)}</b>"
    bars.append(_bar(step, 0.0, step_time_s / unit_s, {"color": MUTED}, "the whole"))
    return figure(
        bars,
        height=330,
        barmode="overlay",
        bargap=0.28,
        xaxis={"title": unit, "range": [0, step_time_s / unit_s * 1.01]},
        yaxis={"autorange": "reversed", "showgrid": False},
    )


def _bar(label: str, start: float, length: float, look: dict[str, Any], counted: str) -> dict[str, Any]:
    """A bar as a separate trace: Plotly warns about hatched bars in a trace with several colors."""
    return bar(
        orientation="h",
        y=[label],
        base=[start],
        x=[length],
        marker=look,
        customdata=[counted],
        hovertemplate="%{y} of the step<br>counted as %{customdata}<extra></extra>",
        showlegend=False,
    )
