"""Figures of one plan: memory by rank as stacked bars, and the step breakdown of a rank as a waterfall."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.figures.style import CAPACITY, MEMORY, MUTED, SPLIT, Figure, across, bar, figure, scatter, time_unit
from app.results.plan import StepPart
from simplan.prediction import RankMemory
from simplan.program.program import MemoryCategory
from simplan.report.table import format_ranks
from simplan.units import GIB, format_bytes, format_percent, format_time

RESERVE = "allocator's reserve"
"""Memory that the caching allocator reserves beyond tensors."""

_MAX_BARS = 64


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """One bar.

    Attributes:
        ranks: Ranks with exactly this memory.
        parts: Bytes by part, in the order of the stack; they sum to ``device_bytes``.
        device_bytes: Peak bytes on the device.
        peak_action: Action at the peak; empty for a peak between steps.
    """

    ranks: tuple[int, ...]
    parts: dict[str, int]
    device_bytes: int
    peak_action: str

    @property
    def label(self) -> str:
        """``0`` or ``0-7``."""
        return format_ranks(list(self.ranks))


def memory_bars(memory: Iterable[RankMemory]) -> tuple[MemoryBar, ...]:
    """One bar per rank; above 64 ranks, one per group of ranks with equal memory."""
    found = [_memory_bar(rank) for rank in memory]
    if len(found) <= _MAX_BARS:
        return tuple(found)
    groups: dict[tuple[object, ...], list[MemoryBar]] = {}
    for one in found:
        groups.setdefault((tuple(one.parts.items()), one.peak_action), []).append(one)
    return tuple(replace(bars[0], ranks=tuple(bar.ranks[0] for bar in bars)) for bars in groups.values())


def _memory_bar(memory: RankMemory) -> MemoryBar:
    parts = {_words(category): memory.by_category.get(category, 0) for category in MEMORY}
    parts[RESERVE] = memory.reserved_bytes - memory.allocated_bytes
    parts["other"] = memory.device_bytes - sum(parts.values())
    return MemoryBar((memory.rank,), {k: v for k, v in parts.items() if v}, memory.device_bytes, memory.peak_action)


def _words(category: MemoryCategory) -> str:
    return str(category).replace("_", " ")


MEMORY_COLOURS = {_words(category): colour for category, colour in MEMORY.items()}
"""Colors by part of the memory, in the order of the stack."""


def memory_rows(bars: Sequence[MemoryBar]) -> list[dict[str, object]]:
    """Memory bars as table rows, in GiB."""
    parts = _parts(bars)
    return [
        {
            "ranks": bar.label,
            **{f"{part}_gib": bar.parts.get(part, 0) / GIB for part in parts},
            "device_gib": bar.device_bytes / GIB,
        }
        for bar in bars
    ]


def _parts(bars: Sequence[MemoryBar]) -> list[str]:
    order = [*MEMORY_COLOURS, RESERVE, "other"]
    return [part for part in order if any(bar.parts.get(part) for bar in bars)]


def memory_figure(bars: Sequence[MemoryBar], capacity_bytes: int | None) -> Figure:
    """One trace per part of the memory, in GiB over ranks, and a line for the capacity.

    Args:
        bars: Bars from ``memory_bars``.
        capacity_bytes: Memory of a device in bytes; None when unknown.
    """
    traces, lines = [], []
    labels = [bar.label for bar in bars]
    when = [f"during {bar.peak_action}" if bar.peak_action else "between steps" for bar in bars]
    for part in _parts(bars):
        values = [bar.parts.get(part, 0) for bar in bars]
        trace = bar(
            name=part,
            x=labels,
            y=[value / GIB for value in values],
            marker={
                "color": MEMORY_COLOURS.get(part, MUTED),
                "line": {"width": 0},
                "pattern": {"shape": "" if part in MEMORY_COLOURS else "/", "size": 5, "solidity": 0.25},
            },
            customdata=[
                [format_bytes(value), f"{value / bar.device_bytes:.1%}", format_bytes(bar.device_bytes), at]
                for value, bar, at in zip(values, bars, when, strict=True)
            ],
            hovertemplate=f"rank %{{x}}<br><b>{part}</b> %{{customdata[0]}}, %{{customdata[1]}} of "
            "%{customdata[2]}<br>%{customdata[3]}<extra></extra>",
        )
        traces.append(trace)
    if capacity_bytes is not None:
        lines.append(across(capacity_bytes / GIB, CAPACITY))
        name = f"device has {format_bytes(capacity_bytes)}"
        traces.append(scatter(x=[None], y=[None], mode="lines", line=CAPACITY, name=name))  # for the legend alone
    most = max([capacity_bytes or 0, *(bar.device_bytes for bar in bars)])
    return figure(
        traces,
        height=330,
        barmode="stack",
        bargap=0.12,
        shapes=lines,
        xaxis={"title": "rank", "type": "category", "showgrid": False},
        yaxis={"title": "GiB", "range": [0, most / GIB * 1.05]},
    )


_HATCHED = ("recompute", "exposed communication")
_HATCH = {"shape": "/", "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.6)", "size": 6, "solidity": 0.2}


def waterfall_figure(parts: Sequence[StepPart], step_time_s: float) -> Figure:
    """A bar for each part, starting at the end of the previous one, and a bar for the step.

    Args:
        parts: From ``step_parts``; they sum to the step.
        step_time_s: Step time in seconds.
    """
    unit, unit_s = time_unit(step_time_s)
    bars, start_s = [], 0.0
    for part in parts:
        label = f"{part.name}  <b>{format_time(part.seconds)}</b>  {format_percent(part.seconds / step_time_s)}"
        look = {"color": SPLIT[part.group]} | ({"pattern": _HATCH} if part.group in _HATCHED else {})
        bars.append(_bar(label, start_s / unit_s, part.seconds / unit_s, look, part.group))
        start_s += part.seconds
    step = f"step  <b>{format_time(step_time_s)}</b>"
    bars.append(_bar(step, 0.0, step_time_s / unit_s, {"color": MUTED}, "step time"))
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
