"""One step as boxes on the streams of ranks, with waits and cost terms; and memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.predictions import predicted_step
from simplan.plan.plan import RankMapping
from simplan.predict import Simulated
from simplan.prediction import RankMemory
from simplan.program.program import STREAMS, MemoryCategory, Op, Program, Stream, Work, gc_paused
from simplan.program.timeline import SpanKind
from simplan.report.drawings.drawing import Box
from simplan.sim.memory import memory_curve
from simplan.units import format_time

MAX_BOXES = 5_000
"""Maximum number of boxes that are drawn; neighbors are merged where a window has more."""

_COMMUNICATION_SHARE = 1 / 3  # of the drawn boxes, at least
_FINEST = 1 / 2_000  # of the window: about half a pixel
_MAX_SAMPLES = 900
_MOST_LABELS = 3
_SAME = 1e-9  # fraction of the step below which two times count as equal


@dataclass(frozen=True, slots=True)
class TimelineBox(Box):
    """Box of an action, layer or communication on a stream.

    Attributes:
        label: Action in torch's notation, e.g. ``0F1``; name of a communication or layer.
        waited_s: Idle time of the stream before the box, in seconds.
        waited_for: Operation whose end started the box; empty without a wait.
        num_bytes: Bytes moved.
        formula: Largest cost terms, with numbers.
        num_merged: Number of boxes that are drawn as this one. Kind and stage are those of most of its time; it has a
            microbatch if all have the same.
        busy_s: Sum of the times of the merged boxes, in seconds.
    """

    label: str = ""
    waited_s: float = 0.0
    waited_for: str = ""
    num_bytes: int = 0
    formula: str = ""
    num_merged: int = 1
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lane:
    """Compute and communication of one rank, both sorted by time.

    Attributes:
        rank: Global rank.
        stages: Stages of the rank, ascending.
        compute, communications: Compute and communication boxes in the window.
    """

    rank: int
    stages: tuple[int, ...]
    compute: tuple[TimelineBox, ...]
    communications: tuple[TimelineBox, ...]


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory of one rank as a step function of time.

    Attributes:
        rank: Global rank.
        times_s: Times in seconds, ascending; each value is valid from its time on.
        by_category: Bytes per nonzero category, (times,) each.
        needed_bytes: Device bytes that decide if the rank fits (``RankMemory.needed_bytes``).
        peak_action: Action at the peak; empty for a peak between steps.
    """

    rank: int
    times_s: tuple[float, ...]
    by_category: dict[MemoryCategory, tuple[int, ...]]
    needed_bytes: int
    peak_action: str

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Sum over the categories."""
        return tuple(map(sum, zip(*self.by_category.values(), strict=True)))

    @property
    def peak(self) -> tuple[float, int]:
        """Time in seconds and tensor bytes of the peak."""
        total = self.total_bytes
        at = max(range(len(total)), key=total.__getitem__)
        return self.times_s[at], total[at]


@dataclass(frozen=True, slots=True)
class TimelineResult:
    """Data of the page Timeline for one plan.

    Attributes:
        name: Name of the scenario or of the schedule.
        step_time_s: Step time in seconds.
        bubble_fraction: Bubble fraction of the prediction.
        window_s: Start and end of the window with boxes, in seconds.
        num_boxes: Number of boxes in the window before neighbors are merged.
        merged_below_s: Neighbors on a stream that together are shorter than this are drawn as one, for compute and for
            communication; 0 where none are merged.
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
    merged_below_s: tuple[float, float]
    lanes: tuple[Lane, ...]
    ranks_per_lane: int
    memory: tuple[MemoryCurve, ...]
    capacity_bytes: int | None
    peak_bytes: int

    @property
    def peak_memory(self) -> MemoryCurve:
        """Memory of the peak-memory rank; the lowest of several."""
        return max(self.memory, key=lambda curve: (curve.needed_bytes, max(curve.total_bytes), -curve.rank))


@gc_paused()
def timeline_result(
    text: str, calibrated_at: int, *, layers: bool = False, start: float = 0.0, end: float = 1.0
) -> TimelineResult:
    """One step of a scenario, or a window of it; where it has more than ``MAX_BOXES`` boxes, neighbors are merged.

    Args:
        text: The scenario's YAML.
        calibrated_at: Modification time of this machine's calibration, a cache key.
        layers: One box per layer instead of one per action.
        start, end: Window as fractions of the step.
    """
    prediction, simulated = predicted_step(text, calibrated_at)
    step = _Step(simulated)
    mapping = RankMapping.of(prediction.job.plan)
    firsts = range(0, mapping.world_size, mapping.ranks_per_stage)
    ranks = [rank for rank in firsts if rank in simulated.program.by_rank]
    step_s = prediction.step_time_s
    start_s, end_s = start * step_s, end * step_s
    computes = [_pieces(step, rank, on_compute=True, by_action=not layers) for rank in ranks]
    communications = [_pieces(step, rank, on_compute=False, by_action=False) for rank in ranks]
    columns = simulated.program.columns
    stages = [tuple(np.unique(columns.stage[[piece.ops[0] for piece in pieces]]).tolist()) for pieces in computes]
    for compute, communication in zip(computes, communications, strict=True):
        _add_waits(compute, communication, step, step_s)
    computes = [_inside(pieces, start_s, end_s) for pieces in computes]
    communications = [_inside(pieces, start_s, end_s) for pieces in communications]
    num_computes, num_moves = (sum(map(len, lanes)) for lanes in (computes, communications))
    num_boxes, window_s = num_computes + num_moves, end_s - start_s
    most_moves = max(int(MAX_BOXES * _COMMUNICATION_SHARE), MAX_BOXES - num_computes)
    moved, moved_below_s = _merged(communications, most_moves, window_s)
    computed, computed_below_s = _merged(computes, MAX_BOXES - sum(map(len, moved)), window_s)
    lanes = tuple(
        Lane(
            rank,
            stages[number],
            tuple(_box(step, group, layers=layers) for group in computed[number]),
            tuple(_box(step, group, communication=True) for group in moved[number]),
        )
        for number, rank in enumerate(ranks)
    )
    memory = {of_rank.rank: of_rank for of_rank in prediction.memory}
    curves = tuple(_memory(simulated, memory[rank]) for rank in ranks)
    return TimelineResult(
        name=prediction.name,
        step_time_s=step_s,
        bubble_fraction=prediction.bubble_fraction,
        window_s=(start_s, end_s),
        num_boxes=num_boxes,
        merged_below_s=(computed_below_s, moved_below_s),
        lanes=lanes,
        ranks_per_lane=mapping.ranks_per_stage,
        memory=curves,
        capacity_bytes=prediction.capacity_bytes,
        peak_bytes=max(max(curve.total_bytes) for curve in curves),
    )


class _Ops(dict[int, Op]):
    """Operations of a program by index, each made once: a program holds arrays, and an operation is a view of a row."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __missing__(self, index: int) -> Op:
        op = self[index] = self._program.ops[index]
        return op


class _Step:
    """A simulated step with what boxes show of its operations."""

    def __init__(self, simulated: Simulated) -> None:
        program, times = simulated.program, simulated.times
        self.simulated, self.times, self.ops = simulated, times, _Ops(program)
        spent_s = times.end_s - times.start_s
        self.recompute_s = np.where(program.of_kind(SpanKind.RECOMPUTE), spent_s, 0.0)
        self._formulas: dict[tuple[int, ...], str] = {}

    @cached_property
    def kinds_moved(self) -> NDArray[np.object_]:
        """``(num_ops,)`` Words for communications of one kind."""

        def words(op: Op) -> str:
            return f"{op.name.partition(' ')[0]} ({_words(op.stream)})"

        program = self.simulated.program
        words_of_ops = self._of_alike(words).astype(object)
        has_own_name = np.array(["{action}" in name for name in program.names])[program.columns.name]
        for index in np.flatnonzero(has_own_name & ~program.on_stream(Stream.COMPUTE)).tolist():
            words_of_ops[index] = words(self.ops[index])
        return words_of_ops

    @cached_property
    def num_bytes(self) -> NDArray[np.int64]:
        """``(num_ops,)`` Bytes moved; 0 for compute."""
        return self._of_alike(lambda op: 0 if op.communication is None else op.communication.num_bytes)

    def _of_alike(self, fact: Callable[[Op], Any]) -> NDArray[Any]:
        """A fact of every operation, from one of those with the same name, work and stream."""
        c = self.simulated.program.columns
        code = (c.work.astype(np.int64) * len(STREAMS) + c.stream) * (int(c.name.max()) + 1) + c.name
        _, first, alike = np.unique(code, return_index=True, return_inverse=True)
        return np.array([fact(self.ops[index]) for index in first.tolist()])[alike]

    def formula(self, indices: Sequence[int]) -> str:
        """The two largest cost terms of operations, with their cost estimates."""
        works = tuple(self.simulated.program.columns.work[indices].tolist())
        if works not in self._formulas:
            self._formulas[works] = self._formula(Counter(works))
        return self._formulas[works]

    def _formula(self, works: Mapping[int, int]) -> str:
        counts: Counter[Work] = Counter()
        for number, count in works.items():
            for work in self.simulated.program.works[number]:
                counts[work] += count
        terms = [(count, self.simulated.program_costs.by_work[work]) for work, count in counts.items()]
        terms.sort(key=lambda pair: -pair[0] * pair[1].cost_estimate.seconds)
        lines = [
            f"{count} x {term.name} {format_time(term.cost_estimate.seconds)}: {term.cost_estimate.formula}"
            for count, term in terms[:2]
        ]
        return "<br>".join(lines + [f"and {len(terms) - 2} more"] * (len(terms) > 2))


@dataclass(slots=True)
class _Piece:
    """Box before it is drawn: operations on a stream that are one action, layer or communication.

    Attributes:
        ops: Indices of the operations.
        start_s, end_s: Seconds from the start of the step.
        waited_s, waited_for: As in ``TimelineBox``.
    """

    ops: list[int]
    start_s: float
    end_s: float
    waited_s: float = 0.0
    waited_for: str = ""


def _pieces(step: _Step, rank: int, *, on_compute: bool, by_action: bool) -> list[_Piece]:
    """Pieces of a rank's compute stream or of its communication: one per action, or one per operation."""
    program, times = step.simulated.program, step.times
    ops = program.rank_indices[rank]
    ops = ops[(times.end_s[ops] > times.start_s[ops]) & (program.on_stream(Stream.COMPUTE, indices=ops) == on_compute)]
    ops = ops[np.argsort(times.start_s[ops], kind="stable")]
    if not len(ops):
        return []
    begins = np.ones(len(ops), np.bool_)
    if by_action:
        columns = (program.columns.stage, program.columns.action, program.columns.microbatch)
        begins[1:] = np.any([column[ops[1:]] != column[ops[:-1]] for column in columns], axis=0)
    firsts = np.flatnonzero(begins)
    ends_s = np.maximum.reduceat(times.end_s[ops], firsts).tolist()
    indices, starts_s = ops.tolist(), times.start_s[ops[firsts]].tolist()
    bounds = [*firsts.tolist(), len(ops)]
    return [_Piece(indices[bounds[i] : bounds[i + 1]], starts_s[i], ends_s[i]) for i in range(len(firsts))]


def _merged(streams: Sequence[Sequence[_Piece]], most: int, window_s: float) -> tuple[list[list[list[_Piece]]], float]:
    """Groups of neighboring pieces, at most ``most`` over all streams, and the length below which they are merged."""
    below_s = 0.0
    groups = [[[piece] for piece in pieces] for pieces in streams]
    while sum(map(len, groups)) > max(most, len(streams)):
        below_s = 2 * below_s or _FINEST * window_s
        groups = [_neighbors(pieces, below_s) for pieces in streams]
    return groups, below_s


def _neighbors(pieces: Sequence[_Piece], below_s: float) -> list[list[_Piece]]:
    groups: list[list[_Piece]] = []
    for piece in pieces:
        if groups and piece.end_s - groups[-1][0].start_s < below_s:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _box(step: _Step, group: Sequence[_Piece], *, layers: bool = False, communication: bool = False) -> TimelineBox:
    """Box of a piece, or of several neighbors."""
    ops = step.ops
    longest = ops[max(group, key=lambda piece: piece.end_s - piece.start_s).ops[0]]
    indices = [index for piece in group for index in piece.ops]
    microbatches = set(step.simulated.program.columns.microbatch[[piece.ops[0] for piece in group]].tolist())
    microbatch = microbatches.pop() if len(microbatches) == 1 else -1
    if communication and len(group) > 1:
        label = _counted(step.kinds_moved[indices].tolist())
    else:
        labels = [_label(ops[piece.ops[0]], named=layers) for piece in (group[0], group[-1])]
        label = labels[0] if len(group) == 1 else f"{labels[0]} to {labels[1]}"
    return TimelineBox(
        action=longest.action._replace(microbatch=microbatch if microbatch >= 0 else None),
        label=label,
        start_s=group[0].start_s,
        end_s=max(piece.end_s for piece in group),
        recompute_s=0.0 if communication else float(step.recompute_s[indices].sum()),
        waited_s=sum(piece.waited_s for piece in group),
        waited_for=max(group, key=lambda piece: piece.waited_s).waited_for,
        num_bytes=int(step.num_bytes[indices].sum()) if communication else 0,
        formula=step.formula(indices),
        num_merged=len(group),
        busy_s=sum(piece.end_s - piece.start_s for piece in group),
    )


def _label(op: Op, *, named: bool) -> str:
    if op.stream is not Stream.COMPUTE:
        return f"{op.name} ({_words(op.stream)})"
    return op.name if named else str(op.action)


def _words(stream: Stream) -> str:
    return str(stream).replace("_", " ")


def _counted(labels: Iterable[str]) -> str:
    """``12 x all_gather (tensor parallel), 3 x send (pipeline)``."""
    counts = Counter(labels)
    words = [f"{number:,} x {label}" for label, number in counts.most_common(_MOST_LABELS)]
    return ", ".join(words + [f"and {len(counts) - _MOST_LABELS} more kinds"] * (len(counts) > _MOST_LABELS))


def _add_waits(compute: Sequence[_Piece], communications: Sequence[_Piece], step: _Step, step_s: float) -> None:
    """Sets ``waited_for``: the operation that ended when the piece began, preferably communication of the rank."""
    ends = np.array(
        sorted((communication.end_s, number) for number, communication in enumerate(communications)) or [(np.inf, 0)]
    )
    free_s = 0.0
    for piece in compute:
        waited_s = piece.start_s - free_s
        free_s = piece.end_s
        if waited_s <= _SAME * step_s:
            continue
        place = int(np.searchsorted(ends[:, 0], piece.start_s - _SAME * step_s))
        after = ends[place] if place < len(ends) and abs(ends[place][0] - piece.start_s) <= 2 * _SAME * step_s else None
        piece.waited_s, piece.waited_for = waited_s, "other ranks"
        if after is not None:
            op = step.ops[communications[int(after[1])].ops[0]]
            piece.waited_for = _label(op, named=False)


def _inside(pieces: Iterable[_Piece], start_s: float, end_s: float) -> list[_Piece]:
    return [piece for piece in pieces if piece.end_s >= start_s and piece.start_s <= end_s]


def _memory(simulated: Simulated, memory: RankMemory) -> MemoryCurve:
    """Memory curve of a rank, downsampled to the largest sample per interval, so that no peak is lost."""
    times_s, held = memory_curve(simulated.program, memory.rank, simulated.times)
    on_device = [simulated.program.one_memory or c is not MemoryCategory.HOST for c in MemoryCategory]
    totals = (held * on_device).sum(axis=1)
    size = max(1, -(-len(totals) // _MAX_SAMPLES))
    parts = np.split(totals, range(size, len(totals), size))
    largest = [number * size + int(part.argmax()) for number, part in enumerate(parts)]
    kept = sorted({0, *largest, len(totals) - 1})
    return MemoryCurve(
        memory.rank,
        tuple(times_s[kept].tolist()),
        {
            category: tuple(held[kept, column].tolist())
            for column, category in enumerate(MemoryCategory)
            if on_device[column] and held[kept, column].any()
        },
        memory.needed_bytes,
        memory.peak_action,
    )
