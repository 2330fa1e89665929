"""Memory by rank as stacked bars, with the capacity of the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.figures.style import Figure, across, bar, figure, scatter
from app.palette import MEMORY, MUTED
from simplan.prediction import RankMemory
from simplan.program.program import MemoryCategory
from simplan.report.table import format_ranks
from simplan.units import GIB, format_bytes

__all__ = ["RESERVE", "MemoryBar", "memory_bars", "memory_figure", "memory_rows"]

RESERVE = "allocator's reserve"
"""Memory that the caching allocator reserves beyond tensors."""

_MOST_BARS = 64
_CAPACITY = {"color": "#d1495b", "width": 1.5, "dash": "dash"}


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """One bar.

    Attributes:
        ranks: Ranks that need exactly this.
        parts: Part -> bytes, in the order of the stack; they sum to ``device_bytes``.
        device_bytes: Peak bytes on the device.
        peak_action: The action during which that is; empty for the time between steps.
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
    found = [_bar(rank) for rank in memory]
    if len(found) <= _MOST_BARS:
        return tuple(found)
    groups: dict[tuple[object, ...], list[MemoryBar]] = {}
    for one in found:
        groups.setdefault((tuple(one.parts.items()), one.peak_action), []).append(one)
    return tuple(
        MemoryBar(
            tuple(rank for bar in bars for rank in bar.ranks), bars[0].parts, bars[0].device_bytes, bars[0].peak_action
        )
        for bars in groups.values()
    )


def _bar(memory: RankMemory) -> MemoryBar:
    parts = {_words(category): memory.by_category.get(category, 0) for category in MEMORY}
    parts[RESERVE] = memory.reserved_bytes - memory.allocated_bytes
    parts["not told apart"] = memory.device_bytes - sum(parts.values())
    return MemoryBar((memory.rank,), {k: v for k, v in parts.items() if v}, memory.device_bytes, memory.peak_action)


def _words(category: MemoryCategory) -> str:
    return str(category).replace("_", " ")


_COLOURS = {_words(category): colour for category, colour in MEMORY.items()}


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
    order = [*_COLOURS, RESERVE, "not told apart"]
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
                "color": _COLOURS.get(part, MUTED),
                "line": {"width": 0},
                "pattern": {"shape": "" if part in _COLOURS else "/", "size": 5, "solidity": 0.25},
            },
            customdata=[
                [format_bytes(value), f"{value / bar.device_bytes:.1%}", format_bytes(bar.device_bytes), at]
                for value, bar, at in zip(values, bars, when, strict=True)
            ],
            hovertemplate=f"rank %{{x}}<br><b>{part}</b> %{{customdata[0]}}, %{{customdata[1]}} of the "
            "%{customdata[2]} that are needed<br>%{customdata[3]}<extra></extra>",
        )
        traces.append(trace)
    if capacity_bytes is not None:
        lines.append(across(capacity_bytes / GIB, _CAPACITY))
        name = f"device has {format_bytes(capacity_bytes)}"
        traces.append(scatter(x=[None], y=[None], mode="lines", line=_CAPACITY, name=name))  # for the legend alone
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
