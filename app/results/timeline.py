"""One step as boxes on the streams of ranks, with what each waited for and what it is made of; and memory over time."""

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
from simplan.report.trace import trace_document
from simplan.sim.memory import memory_trace
from simplan.units import format_time

__all__ = ["MOST_BOXES", "Lane", "MemoryCurve", "TimelineBox", "TimelineResult", "timeline_result", "trace_text"]

MOST_BOXES = 5_000
"""More are not drawn at once: the window ends before them."""

_MOST_SAMPLES = 900
_SAME = 1e-9  # of the step: instants that are so near are one


@dataclass(frozen=True, slots=True)
class TimelineBox:
    """Something that ran on a stream.

    Attributes:
        kind: What is done.
        label: In torch's form, e.g. ``0F1``; of a message, or a layer, its name.
        stage: Stage it works on.
        microbatch: Microbatch; None for what is done once a step.
        start_s, end_s: Seconds from the start of the step.
        recompute_s: Time in it that recomputes forward.
        waited_s: How long the stream had idled.
        waited_for: What ended when it began; empty when it followed at once.
        num_bytes: Bytes moved.
        formula: What it is made of, with numbers.
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
    """A rank: its computation and its messages, both in the order of time.

    Attributes:
        rank: Global rank.
        stages: Stages that it works on, ascending.
        compute, messages: What is in the window.
        idle_fraction: Share of the step in which its compute stream does nothing, communication included.
    """

    rank: int
    stages: tuple[int, ...]
    compute: tuple[TimelineBox, ...]
    messages: tuple[TimelineBox, ...]
    idle_fraction: float


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory of one rank over time: steps, each value holding from its time on.

    Attributes:
        rank: Global rank.
        times_s: Ascending.
        by_category: Bytes, by category that holds any, as long as ``times_s``.
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
    """What the page Timeline shows of one plan.

    Attributes:
        name: Of the scenario, or of the schedule.
        step_time_s: Length of the step.
        bubble_fraction: As of the prediction.
        window_s: From when to when boxes are given.
        num_boxes: In the whole step.
        lanes: One for each place of the pipeline, of which the first rank is drawn.
        ranks_per_lane: Ranks that are drawn by one.
        memory: Of every drawn rank, over the whole step.
        capacity_bytes: Of a device; None when unknown.
        peak_bytes: Most tensors of any drawn rank.
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


def timeline_result(
    text: str, calibrated_at: int, *, layers: bool = False, start: float = 0.0, end: float = 1.0
) -> TimelineResult:
    """One step of a scenario, or a window of it.

    Args:
        text: The scenario's YAML.
        calibrated_at: When this machine's calibration was written, for caches.
        layers: A box for each layer instead of one for each action.
        start, end: The window, as shares of the step; it ends earlier where it would hold more than ``MOST_BOXES``.

    Raises:
        SpecError: As ``predict``.
    """
    prediction, simulated = predicted_step(text, calibrated_at)
    mapping = RankMapping.of(prediction.job.plan)
    ranks = [
        rank for rank in range(0, mapping.world_size, mapping.ranks_per_stage) if rank in simulated.program.by_rank
    ]
    boxes = {rank: (_compute_boxes(simulated, rank, layers=layers), _messages(simulated, rank)) for rank in ranks}
    step_s = prediction.step_time_s
    every = sorted(box.start_s for pair in boxes.values() for part in pair for box in part)
    start_s, end_s = start * step_s, end * step_s
    inside = [time_s for time_s in every if start_s <= time_s <= end_s]
    if len(inside) > MOST_BOXES:
        end_s = inside[MOST_BOXES]
    lanes = []
    for rank, (compute, messages) in boxes.items():
        busy_s = sum(box.end_s - box.start_s for box in compute)
        lanes.append(
            Lane(
                rank,
                tuple(sorted({box.stage for box in compute})),
                tuple(_inside(_explained(simulated, rank, compute, messages, step_s), start_s, end_s)),
                tuple(_inside(messages, start_s, end_s)),
                max(0.0, 1.0 - busy_s / step_s),
            )
        )
    curves = tuple(_memory(simulated, rank) for rank in ranks)
    return TimelineResult(
        name=prediction.name,
        step_time_s=step_s,
        bubble_fraction=prediction.bubble_fraction,
        window_s=(start_s, end_s),
        num_boxes=len(every),
        lanes=tuple(lanes),
        ranks_per_lane=mapping.ranks_per_stage,
        memory=curves,
        capacity_bytes=prediction.capacity_bytes,
        peak_bytes=max(max(curve.total_bytes) for curve in curves),
    )


def trace_text(text: str, calibrated_at: int) -> str:
    """The whole step as a trace for Perfetto, as ``simplan trace`` writes it."""
    prediction, simulated = predicted_step(text, calibrated_at)
    program, times = simulated.program, simulated.times
    memory = {rank: list(memory_trace(program, rank, times)) for rank in program.ranks}
    return json_text(trace_document(prediction.timeline, prediction.name, memory, program.stands_for))


def _compute_boxes(simulated: Simulated, rank: int, *, layers: bool) -> list[TimelineBox]:
    """What runs on the compute stream: neighbours of one action in one box, or each layer in its own."""
    ops, times = simulated.program.ops, simulated.times
    running = [
        index
        for index in simulated.program.by_rank[rank]
        if ops[index].stream is Stream.COMPUTE and times.end_s[index] > times.start_s[index]
    ]
    running.sort(key=lambda index: times.start_s[index])
    groups: Iterable[list[int]] = (
        ([index] for index in running)
        if layers
        else (list(group) for _, group in groupby(running, key=lambda index: ops[index].action))
    )
    found = []
    for group in groups:
        first = ops[group[0]]
        recompute_s = sum(
            float(times.end_s[index] - times.start_s[index]) for index in group if ops[index].kind is SpanKind.RECOMPUTE
        )
        found.append(
            TimelineBox(
                kind=first.action.kind,
                label=first.name if layers else str(first.action),
                stage=first.action.stage,
                microbatch=first.action.microbatch,
                start_s=float(times.start_s[group[0]]),
                end_s=float(max(times.end_s[index] for index in group)),
                recompute_s=recompute_s,
                formula=_formula(simulated, (ops[index] for index in group)),
            )
        )
    return found


def _messages(simulated: Simulated, rank: int) -> list[TimelineBox]:
    ops, times = simulated.program.ops, simulated.times
    found = []
    for index in simulated.program.by_rank[rank]:
        op, start_s, end_s = ops[index], float(times.start_s[index]), float(times.end_s[index])
        if op.stream is Stream.COMPUTE or end_s <= start_s:
            continue
        message = op.message
        found.append(
            TimelineBox(
                kind=op.action.kind,
                label=f"{op.name} ({str(op.stream).replace('_', ' ')})",
                stage=op.action.stage,
                microbatch=op.action.microbatch,
                start_s=start_s,
                end_s=end_s,
                num_bytes=0 if message is None else message.num_bytes,
                formula=_formula(simulated, [op]),
            )
        )
    return sorted(found, key=lambda box: box.start_s)


def _formula(simulated: Simulated, ops: Iterable[Op]) -> str:
    """Its two largest terms with their prices."""
    counts: Counter[Work] = Counter(work for op in ops for work in op.work)
    terms = []
    for work, count in counts.items():
        term = simulated.pricing.by_work[work]
        terms.append(
            (
                count * term.price.seconds,
                f"{count} x {term.name} {format_time(term.price.seconds)}: {term.price.formula}",
            )
        )
    terms.sort(key=lambda term: -term[0])
    more = f"<br>and {len(terms) - 2} more" if len(terms) > 2 else ""
    return "<br>".join(words for _, words in terms[:2]) + more


def _explained(
    simulated: Simulated, rank: int, compute: Sequence[TimelineBox], messages: Sequence[TimelineBox], step_s: float
) -> Iterator[TimelineBox]:
    """Boxes with what they waited for: what ended at the instant at which they begin, a message of this rank first."""
    ends = np.array(sorted((message.end_s, number) for number, message in enumerate(messages)) or [(np.inf, 0)])
    free_s = 0.0
    for box in compute:
        waited_s = box.start_s - free_s
        free_s = box.end_s
        if waited_s <= _SAME * step_s:
            yield box
            continue
        place = int(np.searchsorted(ends[:, 0], box.start_s - _SAME * step_s))
        after = ends[place] if place < len(ends) and abs(ends[place][0] - box.start_s) <= 2 * _SAME * step_s else None
        waited_for = messages[int(after[1])].label if after is not None else "other ranks"
        yield replace(box, waited_s=waited_s, waited_for=waited_for)


def _inside(boxes: Iterable[TimelineBox], start_s: float, end_s: float) -> Iterator[TimelineBox]:
    return (box for box in boxes if box.end_s >= start_s and box.start_s <= end_s)


def _memory(simulated: Simulated, rank: int) -> MemoryCurve:
    """Of many samples the largest of every stretch of time: no peak is lost."""
    counted = [c for c in MemoryCategory if simulated.program.one_memory or c is not MemoryCategory.HOST]
    samples = list(memory_trace(simulated.program, rank, simulated.times))
    totals = [sum(sample.by_category.get(category, 0) for category in counted) for sample in samples]
    size = max(1, -(-len(samples) // _MOST_SAMPLES))
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
