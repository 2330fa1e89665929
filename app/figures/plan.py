"""Data and figures of one plan: memory by rank, and the step breakdown with exposed communication by network tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.figures.style import CAPACITY, MEMORY, MUTED, SPLIT, Figure, across, bar, figure, scatter, stack
from app.predictions import predicted_step
from simplan.explain.term import exposed_s
from simplan.job import Job
from simplan.predict import Simulated
from simplan.prediction import Prediction, RankMemory
from simplan.program.program import Communication, Program, Stream, Work
from simplan.program.timeline import Timeline
from simplan.report.drawings.drawing import time_unit
from simplan.report.table import format_ranks
from simplan.report.text import split_parts
from simplan.units import GIB, format_bytes, format_percent, format_time

RESERVE = "allocator's reserve"
"""Memory that the caching allocator reserves beyond tensors."""

TIERS = WITHIN, BETWEEN, HOST = "within nodes", "between nodes", "to and from the host"
_MAX_BARS = 16


@dataclass(frozen=True, slots=True)
class StepPart:
    """Part of a rank's step; the parts sum to the step time.

    Attributes:
        name: Label, with the network tier for exposed communication.
        group: Key of the six exclusive parts of ``Split``, in words.
        seconds: Time of the part.
    """

    name: str
    group: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Data of the page Plan.

    Attributes:
        prediction: Prediction without the spans of its timeline, to save memory.
        steps: Parts of the step, per simulated rank.
        busiest: Simulated rank with the longest compute time; the lowest of several.
    """

    prediction: Prediction
    steps: Mapping[int, tuple[StepPart, ...]]
    busiest: int


def plan_result(text: str, calibrated_at: int) -> PlanResult:
    """Predicts the plan of a scenario; for arguments see ``predicted_step``."""
    prediction, simulated = predicted_step(text, calibrated_at)
    steps = {rank: step_parts(prediction, simulated, rank) for rank in simulated.program.ranks}
    splits = {memory.rank: split for memory, split in zip(prediction.memory, prediction.splits, strict=True)}
    busy_s = {rank: splits[rank].compute_s + splits[rank].recompute_s + splits[rank].optimizer_s for rank in steps}
    busiest = max(steps, key=lambda rank: (busy_s[rank], -rank))
    bare = Timeline((), prediction.timeline.num_ranks, prediction.timeline.step_time_s)
    return PlanResult(replace(prediction, timeline=bare), steps, busiest)


def step_parts(prediction: Prediction, simulated: Simulated, rank: int) -> tuple[StepPart, ...]:
    """Parts of a rank's step that take time; tiers share its exposed communication as in the simulated microbatches.

    Args:
        prediction: Prediction of the step.
        simulated: Its simulated step.
        rank: A simulated rank.
    """
    split = prediction.splits[[memory.rank for memory in prediction.memory].index(rank)]
    exposed_s = _exposed_s(prediction.job, simulated, rank)
    longer = split.exposed_communication_s / (sum(exposed_s.values()) or 1.0)
    parts = []
    for name, seconds in split_parts(split).items():
        if name == "exposed communication":
            parts += [StepPart(f"exposed {tier}", name, tier_s * longer) for tier, tier_s in exposed_s.items()]
        else:
            parts.append(StepPart(name, name, seconds))
    return tuple(part for part in parts if part.seconds > 1e-9 * prediction.step_time_s)


def _exposed_s(job: Job, simulated: Simulated, rank: int) -> dict[str, float]:
    """Exposed seconds of a rank in the simulated step, by tier."""
    program, times = simulated.program, simulated.times
    ops = program.rank_indices[rank]
    ops = ops[times.end_s[ops] > times.start_s[ops]]
    on_compute = program.on_stream(Stream.COMPUTE, indices=ops)
    computing_s, moving_s = (
        np.array([times.start_s[of_stream], times.end_s[of_stream]])
        for of_stream in (ops[on_compute], ops[~on_compute])
    )
    tiers = _tiers(job, program, ops[~on_compute])
    return dict(zip(TIERS, exposed_s(computing_s, moving_s, tiers, len(TIERS)).tolist(), strict=True))


def _tiers(job: Job, program: Program, moving: NDArray[np.int64]) -> NDArray[np.int64]:
    """``(communications,)`` Tier of each communication of one rank, as an index into ``TIERS``."""
    works, kinds = np.unique(program.columns.work[moving], return_inverse=True)
    tiers = [TIERS.index(_tier(program.works[work], job.node_of)) for work in works]
    return np.array(tiers, np.int64)[kinds]


def _tier(works: Sequence[Work], node_of: Callable[[int], int]) -> str:
    """Links of a communication: host link, inside of nodes, or between nodes."""
    ranks = next((part.ranks for part in works if isinstance(part, Communication)), ())
    if not ranks:
        return HOST
    return WITHIN if len(set(map(node_of, ranks))) == 1 else BETWEEN


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
    """One bar per rank; above 16 ranks, one per group of ranks with equal memory."""
    bars_of_ranks = [_memory_bar(rank) for rank in memory]
    if len(bars_of_ranks) <= _MAX_BARS:
        return tuple(bars_of_ranks)
    groups: dict[tuple[object, ...], list[MemoryBar]] = {}
    for bar_of_rank in bars_of_ranks:
        groups.setdefault((tuple(bar_of_rank.parts.items()), bar_of_rank.peak_action), []).append(bar_of_rank)
    return tuple(replace(bars[0], ranks=tuple(bar.ranks[0] for bar in bars)) for bars in groups.values())


def _memory_bar(memory: RankMemory) -> MemoryBar:
    parts = {str(category).replace("_", " "): memory.by_category.get(category, 0) for category in MEMORY}
    parts[RESERVE] = memory.reserved_bytes - memory.allocated_bytes
    parts["other"] = memory.device_bytes - sum(parts.values())
    return MemoryBar((memory.rank,), {k: v for k, v in parts.items() if v}, memory.device_bytes, memory.peak_action)


def memory_rows(bars: Sequence[MemoryBar]) -> list[dict[str, object]]:
    """Memory bars as table rows, in GiB."""
    parts = _parts(bars)
    return [
        {
            "ranks": bar.label,
            **{f"{part}_gib": values[place] / GIB for part, values in parts.items()},
            "device_gib": bar.device_bytes / GIB,
        }
        for place, bar in enumerate(bars)
    ]


def _parts(bars: Sequence[MemoryBar]) -> dict[str, list[int]]:
    """Bytes of every bar by part, in the order of the stack, without parts that no bar has."""
    order = [*(str(category).replace("_", " ") for category in MEMORY), RESERVE, "other"]
    parts = {part: [bar.parts.get(part, 0) for bar in bars] for part in order}
    return {part: values for part, values in parts.items() if any(values)}


def memory_stack(bars: Sequence[MemoryBar], names: Sequence[str]) -> list[dict[str, Any]]:
    """Traces of the parts of the memory, in GiB.

    Args:
        bars: Bars from ``memory_bars``.
        names: Names of the bars.
    """
    when = [f"during {bar.peak_action}" if bar.peak_action else "between steps" for bar in bars]
    tooltips = {
        part: [
            f"{format_bytes(value)}, {value / bar.device_bytes:.1%} of {format_bytes(bar.device_bytes)}<br>{at}"
            for value, bar, at in zip(values, bars, when, strict=True)
        ]
        for part, values in _parts(bars).items()
    }
    return stack(names, {part: [value / GIB for value in values] for part, values in _parts(bars).items()}, tooltips)


def memory_figure(bars: Sequence[MemoryBar], capacity_bytes: int | None) -> Figure:
    """One trace per part of the memory, in GiB over ranks, and a line for the capacity.

    Args:
        bars: Bars from ``memory_bars``.
        capacity_bytes: Memory of a device in bytes; None when unknown.
    """
    traces, lines = memory_stack(bars, [bar.label for bar in bars]), []
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
