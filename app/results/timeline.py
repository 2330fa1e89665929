"""One step as boxes on the streams of ranks, with waits and cost terms; and memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from app.results.plan import predicted_step
from simplan.io import json_text
from simplan.plan.plan import RankMapping
from simplan.predict import Simulated
from simplan.program.action import ActionKind
from simplan.program.program import MemoryCategory, Op, Stream, Work
from simplan.program.timeline import SpanKind
from simplan.report.trace import predicted_trace
from simplan.sim.memory import memory_trace
from simplan.units import format_time

MAX_BOXES = 5_000
"""Maximum number of boxes in a window; a window ends before it has more."""

_MAX_SAMPLES = 900
_SAME = 1e-9  # fraction of the step below which two times count as equal


@dataclass(frozen=True, slots=True)
class TimelineBox:
    """Box of the timeline: an action, layer or communication on a stream.

    Attributes:
        kind: Action kind.
        label: Action in torch's notation, e.g. ``0F1``; name of a communication or layer.
        stage: Stage of the action.
        microbatch: Microbatch; None for work done once per step.
        start_s, end_s: Seconds from the start of the step.
        recompute_s: Seconds of the box that recompute forward.
        waited_s: Idle time of the stream before the box, in seconds.
        waited_for: Operation whose end started the box; empty without a wait.
        num_bytes: Bytes moved.
        formula: Largest cost terms, with numbers.
    """

    kind: ActionKind
    label: str
    stage: int
    microbatch: int | None
    start_s: float
    end_s: float
    recompute_s: float = 0.0
    waited_s: float = 0.0
    waited_for: str = ""
    num_bytes: int = 0
    formula: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """Compute and communication of one rank, both sorted by time.

    Attributes:
        rank: Global rank.
        stages: Stages of the rank, ascending.
        compute, communications: Compute and communication boxes in the window.
        idle_fraction: Fraction of the step in which the compute stream is idle, exposed communication included.
    """

    rank: int
    stages: tuple[int, ...]
    compute: tuple[TimelineBox, ...]
    communications: tuple[TimelineBox, ...]
    idle_fraction: float


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory of one rank as a step function of time.

    Attributes:
        rank: Global rank.
        times_s: Times in seconds, ascending; each value is valid from its time on.
        by_category: Bytes per nonzero category, (times,) each.
    """

    rank: int
    times_s: tuple[float, ...]
    by_category: dict[MemoryCategory, tuple[int, ...]]

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Sum over the categories."""
        return tuple(map(sum, zip(*self.by_category.values(), strict=True)))


@dataclass(frozen=True, slots=True)
class TimelineResult:
    """Data of the page Timeline for one plan.

    Attributes:
        name: Name of the scenario or of the schedule.
        step_time_s: Step time in seconds.
        bubble_fraction: Bubble fraction of the prediction.
        window_s: Start and end of the window with boxes, in seconds.
        num_boxes: Number of boxes in the full step.
        lanes: One lane per pipeline coordinate, for its first rank.
        ranks_per_lane: Number of ranks that one lane represents.
        memory: Memory of every drawn rank, over the full step.
        capacity_bytes: Memory of a device in bytes; None when unknown.
        peak_bytes: Largest tensor bytes of any drawn rank.
    """

    name: str
    step_time_s: float
    bubble_fraction: float
    window_s: tuple[float, float]
    num_boxes: int
    lanes: tuple[Lane, ...]
    ranks_per_lane: int
    memory: tuple[MemoryCurve, ...]
    capacity_bytes: int | None
    peak_bytes: int

    @property
    def peak_memory(self) -> MemoryCurve:
        """Memory of the peak-memory rank; the lowest of several."""
        return max(self.memory, key=lambda curve: (max(curve.total_bytes), -curve.rank))


def timeline_result(
    text: str, calibrated_at: int, *, layers: bool = False, start: float = 0.0, end: float = 1.0
) -> TimelineResult:
    """One step of a scenario, or a window of it.

    Args:
        text: The scenario's YAML.
        calibrated_at: Modification time of this machine's calibration, a cache key.
        layers: One box per layer instead of one per action.
        start, end: Window as fractions of the step; it ends earlier at ``MAX_BOXES`` boxes.
    """
    prediction, simulated = predicted_step(text, calibrated_at)
    mapping = RankMapping.of(prediction.job.plan)
    firsts = range(0, mapping.world_size, mapping.ranks_per_stage)
    ranks = [rank for rank in firsts if rank in simulated.program.by_rank]
    boxes = {rank: (_compute_boxes(simulated, rank, layers=layers), _communications(simulated, rank)) for rank in ranks}
    step_s = prediction.step_time_s
    every = sorted(box.start_s for pair in boxes.values() for part in pair for box in part)
    start_s, end_s = start * step_s, end * step_s
    inside = [time_s for time_s in every if start_s <= time_s <= end_s]
    if len(inside) > MAX_BOXES:
        end_s = inside[MAX_BOXES]
    lanes = tuple(
        Lane(
            rank,
            tuple(sorted({box.stage for box in compute})),
            tuple(_inside(_with_waits(compute, communications, step_s), start_s, end_s)),
            tuple(_inside(communications, start_s, end_s)),
            max(0.0, 1.0 - sum(box.end_s - box.start_s for box in compute) / step_s),
        )
        for rank, (compute, communications) in boxes.items()
    )
    curves = tuple(_memory(simulated, rank) for rank in ranks)
    return TimelineResult(
        name=prediction.name,
        step_time_s=step_s,
        bubble_fraction=prediction.bubble_fraction,
        window_s=(start_s, end_s),
        num_boxes=len(every),
        lanes=lanes,
        ranks_per_lane=mapping.ranks_per_stage,
        memory=curves,
        capacity_bytes=prediction.capacity_bytes,
        peak_bytes=max(max(curve.total_bytes) for curve in curves),
    )


def trace_text(text: str, calibrated_at: int) -> str:
    """Output file of ``simplan trace``."""
    return json_text(predicted_trace(*predicted_step(text, calibrated_at)))


def _compute_boxes(simulated: Simulated, rank: int, *, layers: bool) -> list[TimelineBox]:
    """Boxes of the compute stream: one per run of operations of an action, or one per layer."""
    ops, times = simulated.program.ops, simulated.times
    running = [
        index
        for index in simulated.program.by_rank[rank]
        if ops[index].stream is Stream.COMPUTE and times.end_s[index] > times.start_s[index]
    ]
    running.sort(key=lambda index: times.start_s[index])
    boxes = []
    for _, grouped in groupby(running, key=(lambda index: index) if layers else (lambda index: ops[index].action)):
        group = list(grouped)
        first = ops[group[0]]
        recomputing = [index for index in group if ops[index].kind is SpanKind.RECOMPUTE]
        boxes.append(
            TimelineBox(
                kind=first.action.kind,
                label=first.name if layers else str(first.action),
                stage=first.action.stage,
                microbatch=first.action.microbatch,
                start_s=float(times.start_s[group[0]]),
                end_s=float(max(times.end_s[index] for index in group)),
                recompute_s=sum(float(times.end_s[index] - times.start_s[index]) for index in recomputing),
                formula=_formula(simulated, (ops[index] for index in group)),
            )
        )
    return boxes


def _communications(simulated: Simulated, rank: int) -> list[TimelineBox]:
    ops, times = simulated.program.ops, simulated.times
    found = []
    for index in simulated.program.by_rank[rank]:
        op, start_s, end_s = ops[index], float(times.start_s[index]), float(times.end_s[index])
        if op.stream is Stream.COMPUTE or end_s <= start_s:
            continue
        communication = op.communication
        found.append(
            TimelineBox(
                kind=op.action.kind,
                label=f"{op.name} ({str(op.stream).replace('_', ' ')})",
                stage=op.action.stage,
                microbatch=op.action.microbatch,
                start_s=start_s,
                end_s=end_s,
                num_bytes=0 if communication is None else communication.num_bytes,
                formula=_formula(simulated, [op]),
            )
        )
    return sorted(found, key=lambda box: box.start_s)


def _formula(simulated: Simulated, ops: Iterable[Op]) -> str:
    """The two largest cost terms of operations, with their cost estimates."""
    counts: Counter[Work] = Counter(work for op in ops for work in op.work)
    terms = [(count, simulated.program_costs.by_work[work]) for work, count in counts.items()]
    terms.sort(key=lambda pair: -pair[0] * pair[1].cost_estimate.seconds)
    lines = [
        f"{count} x {term.name} {format_time(term.cost_estimate.seconds)}: {term.cost_estimate.formula}"
        for count, term in terms[:2]
    ]
    return "<br>".join(lines + [f"and {len(terms) - 2} more"] * (len(terms) > 2))


def _with_waits(
    compute: Sequence[TimelineBox], communications: Sequence[TimelineBox], step_s: float
) -> Iterator[TimelineBox]:
    """Boxes with ``waited_for``: the operation that ended when the box began, preferably communication of the rank."""
    ends = np.array(
        sorted((communication.end_s, number) for number, communication in enumerate(communications)) or [(np.inf, 0)]
    )
    free_s = 0.0
    for box in compute:
        waited_s = box.start_s - free_s
        free_s = box.end_s
        if waited_s <= _SAME * step_s:
            yield box
            continue
        place = int(np.searchsorted(ends[:, 0], box.start_s - _SAME * step_s))
        after = ends[place] if place < len(ends) and abs(ends[place][0] - box.start_s) <= 2 * _SAME * step_s else None
        waited_for = communications[int(after[1])].label if after is not None else "other ranks"
        yield replace(box, waited_s=waited_s, waited_for=waited_for)


def _inside(boxes: Iterable[TimelineBox], start_s: float, end_s: float) -> Iterator[TimelineBox]:
    return (box for box in boxes if box.end_s >= start_s and box.start_s <= end_s)


def _memory(simulated: Simulated, rank: int) -> MemoryCurve:
    """Memory curve of a rank, downsampled to the largest sample per interval, so that no peak is lost."""
    counted = [c for c in MemoryCategory if simulated.program.one_memory or c is not MemoryCategory.HOST]
    samples = list(memory_trace(simulated.program, rank, simulated.times))
    totals = [sum(sample.by_category.get(category, 0) for category in counted) for sample in samples]
    size = max(1, -(-len(samples) // _MAX_SAMPLES))
    kept = [
        max(range(first, min(first + size, len(samples))), key=totals.__getitem__)
        for first in range(0, len(samples), size)
    ]
    kept = sorted({0, *kept, len(samples) - 1})
    categories = [c for c in counted if any(samples[index].by_category.get(c, 0) for index in kept)]
    return MemoryCurve(
        rank,
        tuple(samples[index].time_s for index in kept),
        {c: tuple(samples[index].by_category.get(c, 0) for index in kept) for c in categories},
    )
