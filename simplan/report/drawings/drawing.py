"""Drawing of one pipeline step as plain data, and the labels that its text and its SVG share.

A row is a pipeline rank, a box is an action. Of the ranks that share a pipeline coordinate, the first is drawn: folding
keeps the first rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from simplan.plan.plan import RankMapping
from simplan.prediction import Prediction
from simplan.program.action import Action, ActionKind
from simplan.program.program import Stream
from simplan.program.timeline import COMPUTING, Span, SpanKind, Timeline
from simplan.report.text import verdict
from simplan.units import counted, format_percent, format_time

WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
    ActionKind.UNSHARD: "unpacking gathered parameters",
    ActionKind.REDUCE_GRAD: "scaling and packing gradients",
    ActionKind.OPTIM: "optimizer step",
}
"""Kinds of actions on the compute stream, in words."""

_SCHEMA_VERSION = 1
_DRAWN = COMPUTING | {SpanKind.OPTIMIZER, SpanKind.HOST}


@dataclass(frozen=True, slots=True)
class Box:
    """Time span from the first to the last compute operation of one action.

    Attributes:
        action: Kind, stage and microbatch.
        start_s, end_s: Seconds from the start of the step.
        recompute_s: Seconds of recomputation.
    """

    action: Action
    start_s: float
    end_s: float
    recompute_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def recomputed_share(self) -> float:
        """Fraction of the box that is recomputation."""
        return self.recompute_s / self.duration_s


@dataclass(frozen=True)
class DrawnRank:
    """One row.

    Attributes:
        rank: Global rank that is drawn.
        boxes: In the order of time; they do not overlap.
        idle_fraction: Fraction of idle time on the compute stream, from the first to the last computation of any drawn
            rank, without the optimizer step. The mean over rows is the bubble fraction.
        activations_in_flight: Maximum number of microbatches in flight, by stage; empty when unknown.
    """

    rank: int
    boxes: tuple[Box, ...]
    idle_fraction: float
    activations_in_flight: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Stages that the rank works on, ascending."""
        return tuple(sorted({box.action.stage for box in self.boxes}))


@dataclass(frozen=True)
class PipelineDrawing:
    """Drawing of a pipeline step: one row per pipeline rank.

    Attributes:
        name: Scenario name.
        step_time_s: Length of the step.
        ranks_per_row: Ranks per pipeline coordinate, of which the first is drawn.
        rows: By pipeline rank.
        placement: ``Job.placement_words``.
        unfit: Verdict on a plan that does not fit, or may not; empty for any other.
        closed_form_bubble: ``Prediction.closed_form_bubble``; empty for one pipeline rank.
        unit: Unit of times that are no seconds, for a schedule with times of its own; empty for a prediction.
    """

    name: str
    step_time_s: float
    ranks_per_row: int
    rows: tuple[DrawnRank, ...]
    placement: str = ""
    unfit: str = ""
    closed_form_bubble: str = ""
    unit: str = ""

    @property
    def idle_fraction(self) -> float:
        """Mean of the rows, the bubble fraction."""
        return sum(row.idle_fraction for row in self.rows) / len(self.rows)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All boxes, row by row."""
        return tuple(box for row in self.rows for box in row.boxes)

    @cached_property
    def kinds(self) -> tuple[ActionKind, ...]:
        """Kinds of actions that are drawn, in the order of ``ActionKind``."""
        drawn = {box.action.kind for box in self.boxes}
        return tuple(kind for kind in ActionKind if kind in drawn)

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches of the step."""
        return len({box.action.microbatch for box in self.boxes} - {None})

    @cached_property
    def several_stages(self) -> bool:
        """True when a rank has more than one stage."""
        return any(len(row.stages) > 1 for row in self.rows)

    @cached_property
    def recomputes(self) -> bool:
        """True when a box recomputes forward."""
        return any(box.recompute_s > 0 for box in self.boxes)

    def to_json(self) -> dict[str, Any]:
        """The picture as the JSON document that the command line prints."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "kind": "drawing",
            "name": self.name,
            "step_time_s": self.step_time_s,
            "num_microbatches": self.num_microbatches,
            "ranks_per_row": self.ranks_per_row,
            "idle_fraction": self.idle_fraction,
            "closed_form_bubble": self.closed_form_bubble,
            "unfit": self.unfit,
            **({"placement": self.placement} if self.placement else {}),
            "rows": [
                {
                    "pipeline_rank": pipeline_rank,
                    "rank": row.rank,
                    "stages": list(row.stages),
                    "idle_fraction": row.idle_fraction,
                    "activations_in_flight": {str(k): v for k, v in row.activations_in_flight.items()},
                    "boxes": [
                        {
                            "action": str(box.action),
                            "kind": str(box.action.kind),
                            "stage": box.action.stage,
                            "microbatch": box.action.microbatch,
                            "start_s": box.start_s,
                            "end_s": box.end_s,
                            "recompute_s": box.recompute_s,
                        }
                        for box in row.boxes
                    ],
                }
                for pipeline_rank, row in enumerate(self.rows)
            ],
        }


def draw_pipeline(prediction: Prediction) -> PipelineDrawing:
    """The picture of a predicted step."""
    mapping = RankMapping.of(prediction.job.plan)
    drawing = draw_timeline(
        prediction.name,
        prediction.timeline,
        range(0, mapping.world_size, mapping.ranks_per_stage),
        ranks_per_row=mapping.ranks_per_stage,
        activations_in_flight={memory.rank: memory.activations_in_flight for memory in prediction.memory},
    )
    is_certain = prediction.memory_verdict in (None, "fits")
    return replace(
        drawing,
        placement=prediction.job.placement_words,
        unfit="" if is_certain else verdict(prediction),
        closed_form_bubble=prediction.closed_form_bubble if prediction.job.plan.pp > 1 else "",
    )


def draw_timeline(
    name: str,
    timeline: Timeline,
    ranks: Sequence[int],
    *,
    ranks_per_row: int = 1,
    activations_in_flight: Mapping[int, Mapping[int, int]] | None = None,
) -> PipelineDrawing:
    """Drawing of some ranks of a timeline.

    Args:
        name: Name to show.
        timeline: Timeline whose compute spans belong to actions.
        ranks: Ranks to draw, one per row.
        ranks_per_row: Ranks per pipeline coordinate; every drawn rank represents all of them.
        activations_in_flight: Rank -> stage -> maximum number of microbatches in flight; None when unknown.

    Raises:
        ProgramError: A computation belongs to no action.
    """
    of_rank = timeline.by_rank(ranks)
    spans = {rank: _computations(of_rank.get(rank, [])) for rank in ranks}
    working = [span for spans_of_rank in spans.values() for span in spans_of_rank if span.kind in COMPUTING]
    assert working, f"ranks {list(ranks)} compute nothing"
    total_s = max(span.end_s for span in working) - min(span.start_s for span in working)
    rows = tuple(
        DrawnRank(
            rank,
            _boxes(spans_of_rank),
            1.0 - sum(span.end_s - span.start_s for span in spans_of_rank if span.kind in COMPUTING) / total_s,
            (activations_in_flight or {}).get(rank, {}),
        )
        for rank, spans_of_rank in spans.items()
    )
    return PipelineDrawing(name, timeline.step_time_s, ranks_per_row, rows)


def _computations(spans: Iterable[Span]) -> list[Span]:
    """Spans of nonzero length on the compute stream of a rank, by start time."""
    computing = (span for span in spans if span.stream == Stream.COMPUTE and span.kind in _DRAWN)
    return sorted((span for span in computing if span.end_s > span.start_s), key=lambda span: span.start_s)


def _boxes(spans: list[Span]) -> tuple[Box, ...]:
    """Neighbours of one action form a box; an action that another one interrupts has several."""
    boxes = []
    for action, group in groupby(spans, key=lambda span: span.action):
        inside = list(group)
        recompute_s = sum(span.end_s - span.start_s for span in inside if span.kind is SpanKind.RECOMPUTE)
        boxes.append(Box(Action.parse(action), inside[0].start_s, inside[-1].end_s, recompute_s))
    return tuple(boxes)


class Tick(NamedTuple):
    """Tick of the time axis: position and label."""

    time_s: float
    label: str


def clean(name: str) -> str:
    """A name without line breaks and other characters that neither a line of text nor XML can hold."""
    return "".join(character if character.isprintable() else "?" for character in name)


def heading(drawing: PipelineDrawing) -> str:
    """Name and step time."""
    if drawing.unit:
        return f"{clean(drawing.name)}: {drawing.step_time_s:g} {drawing.unit}"
    return f"{clean(drawing.name)}: one step in {format_time(drawing.step_time_s)}, as predicted"


def subheading(drawing: PipelineDrawing) -> str:
    """Number of pipeline ranks and microbatches of a drawing; and the verdict on a plan that may not fit."""
    one_of = f", the first of {drawing.ranks_per_row} ranks per stage" if drawing.ranks_per_row > 1 else ""
    plural = "" if drawing.num_microbatches == 1 else "es"
    unfit = f"; {drawing.unfit}" if drawing.unfit else ""
    ranks = counted(len(drawing.rows), "pipeline rank")
    return f"{ranks}{one_of}; {drawing.num_microbatches} microbatch{plural}{unfit}"


def row_figures(row: DrawnRank) -> tuple[str, str]:
    """Idle share and activations in flight (stage by stage, empty when unknown) of a rank."""
    in_flight = "+".join(str(number) for _, number in sorted(row.activations_in_flight.items()))
    return format_percent(row.idle_fraction), in_flight


def notes(drawing: PipelineDrawing) -> list[str]:
    """Notes of the legend on labels and on the figures of a row."""
    sentences = ["3F0: stage 3, forward of microbatch 0"] if drawing.several_stages else []
    sentences.append("idle: share of the time from the first to the last computation, without the optimizer step")
    if len(drawing.rows) > 1:
        ideal = drawing.closed_form_bubble
        of_equal = f"; of equal stages and zero-cost communication: {ideal}" if ideal else ""
        sentences.append(f"mean idle: {format_percent(drawing.idle_fraction)}{of_equal}")
    if any(row.activations_in_flight for row in drawing.rows):
        where = "each stage of a rank" if drawing.several_stages else "a rank"
        sentences.append(f"in flight: maximum number of microbatches with saved activations on {where}")
    if drawing.placement:
        sentences.append(f"placement: {drawing.placement}")
    return sentences


def labels(box: Box, several_stages: bool) -> tuple[str, ...]:
    """Labels of a box, longest first, in torch's notation; the stage is shown only if ranks have several stages.

    >>> labels(Box(Action.parse("3F12"), 0.0, 1.0), several_stages=True)
    ('3F12', 'F12')
    """
    action = box.action
    short = str(action.kind) if action.microbatch is None else f"{action.kind}{action.microbatch}"
    return (str(action), short) if several_stages and action.microbatch is not None else (short,)


def box_facts(box: Box, unit: str = "") -> list[str]:
    """Microbatch and stage of a box, start and duration, and recomputation if there is some, for tooltips.

    Args:
        unit: As of a drawing.

    >>> box_facts(Box(Action.parse("3F12"), 0.0, 1.0))
    ['microbatch 12 on stage 3', 'starts at 0 s, takes 1.000 s']
    """
    stage, microbatch = box.action.stage, box.action.microbatch
    start, duration, recompute = (
        f"{time:g} {unit}" if unit else format_time(time) for time in (box.start_s, box.duration_s, box.recompute_s)
    )
    recomputing = [f"{recompute} of it recomputing"] if box.recompute_s > 0 else []
    of = f"stage {stage}" if microbatch is None else f"microbatch {microbatch} on stage {stage}"
    return [of, f"starts at {start}, takes {duration}", *recomputing]


def time_unit(seconds: float) -> tuple[str, float]:
    """Unit of a time axis of some length, and the unit in seconds: s from a second on, else ms."""
    return ("s", 1.0) if seconds >= 1.0 else ("ms", 1e-3)


def ticks(step_time_s: float, most: int, unit: str = "") -> tuple[Tick, ...]:
    """Round times from 0 to the end of the step in the unit of ``time_unit``; the last one names the unit.

    Args:
        step_time_s: Length of the axis.
        most: Largest number of ticks after the one at 0; at least 1.
        unit: As of a drawing.

    >>> [tick.label for tick in ticks(0.26, 6)]
    ['0', '50', '100', '150', '200', '250 ms']
    """
    unit, unit_s = (unit, 1.0) if unit else time_unit(step_time_s)
    length = step_time_s / unit_s
    power = 10.0 ** math.floor(math.log10(length / most))
    distance = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * most >= length)
    values = [number * distance for number in range(int(length / distance) + 1)]
    texts = [f"{value:.6g}" for value in values]
    texts[-1] += f" {unit}"
    return tuple(Tick(value * unit_s, text) for value, text in zip(values, texts, strict=True))
