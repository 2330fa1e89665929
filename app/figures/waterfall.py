"""Where a rank's step goes: its shares as steps down from the first start to the last end."""

from __future__ import annotations

from collections.abc import Sequence

from app.figures.style import Figure, bar, figure
from app.palette import MUTED, SPLIT
from app.results.plan import StepPart
from simplan.units import format_percent, format_time

__all__ = ["waterfall_figure"]

_HATCHED = ("recompute", "exposed communication")


def waterfall_figure(parts: Sequence[StepPart], step_time_s: float) -> Figure:
    """A bar for each share, each beginning where the one before ends, and the step below.

    Args:
        parts: From ``step_parts``; they sum to the step.
        step_time_s: The step.
    """
    unit, unit_s = ("s", 1.0) if step_time_s >= 1.0 else ("ms", 1e-3)
    starts = [sum(part.seconds for part in parts[:number]) for number in range(len(parts))]
    labels = [
        f"{part.name}  <b>{format_time(part.seconds)}</b>  {format_percent(part.seconds / step_time_s)}"
        for part in parts
    ]
    bars = bar(
        orientation="h",
        y=[*labels, f"step  <b>{format_time(step_time_s)}</b>"],
        x=[*(part.seconds / unit_s for part in parts), step_time_s / unit_s],
        base=[*(start / unit_s for start in starts), 0.0],
        marker={
            "color": [*(SPLIT[part.group] for part in parts), MUTED],
            "pattern": {  # with bgcolor beside color the hatched bars would be drawn on nothing
                "shape": [*("/" if part.group in _HATCHED else "" for part in parts), ""],
                "fillmode": "overlay",
                "fgcolor": "rgba(255,255,255,0.6)",
                "size": 6,
                "solidity": 0.2,
            },
        },
        customdata=[*(part.group for part in parts), "the whole"],
        hovertemplate="%{y} of the step<br>counted as %{customdata}<extra></extra>",
        showlegend=False,
    )
    return figure(
        [bars],
        height=330,
        bargap=0.28,
        xaxis={"title": unit, "range": [0, step_time_s / unit_s * 1.01]},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
