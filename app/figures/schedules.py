"""Schedules on a small pipeline with equal stages, for learning: the timeline up to a time, and the bubble.

Times have any unit, which is written as one second in the records of ``simplan draw``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.program.action import ActionKind
from simplan.program.schedules import SCHEDULES, PipelineShape
from simplan.program.schedules.shape import StageTimes, action_ends_s
from simplan.report.drawings.drawing import Box, DrawnRank, PipelineDrawing

_MAX_INSTANTS = 120
_CLOSE = 1e-6  # units; instants and ends are rounded


@dataclass(frozen=True)
class ScheduleTimeline:
    """Timeline of a schedule.

    Attributes:
        name: Name of the schedule.
        num_microbatches: Number of microbatches, m.
        virtual_stages: Number of stages per rank, v.
        times: Times of every stage.
        rows: Actions by rank, then by time.
    """

    name: str
    num_microbatches: int
    virtual_stages: int
    times: StageTimes
    rows: tuple[tuple[Box, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks, p."""
        return len(self.rows)

    @cached_property
    def length(self) -> float:
        """Time from the first start to the last end."""
        return max(box.end_s for row in self.rows for box in row)

    @cached_property
    def idle(self) -> float:
        """Idle time, summed over ranks."""
        return self.num_ranks * self.length - sum(box.duration_s for row in self.rows for box in row)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of ``length`` in which ranks idle, mean over ranks."""
        return self.idle / (self.num_ranks * self.length)

    @cached_property
    def most_in_flight(self) -> tuple[float, ...]:
        """Maximum number of microbatches in flight per rank."""
        starts = {box.start_s for row in self.rows for box in row}
        return tuple(max(self.in_flight(rank, time) for time in starts) for rank in range(self.num_ranks))

    def in_flight(self, rank: int, time: float) -> float:
        """Microbatches in flight on a rank at a time: from the start of F to the end of B, or of W.

        In one of v stages per rank, a microbatch counts 1/v: the stage has that fraction of the rank's layers.
        """
        time += _CLOSE
        begun = sum(box.start_s <= time for box in self.rows[rank] if box.action.kind is ActionKind.FORWARD)
        ends = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        ended = sum(box.end_s <= time for box in self.rows[rank] if box.action.kind in ends)
        return (begun - ended) / self.virtual_stages

    @property
    def instants(self) -> list[float]:
        """Times to look at: one per time unit, or per shortest action, up to a maximum number, and the end."""
        shortest = min(1.0, *(box.duration_s for row in self.rows for box in row))
        number = min(_MAX_INSTANTS, math.ceil(self.length / shortest - 1e-9))
        return [round(self.length * place / number, 6) for place in range(number)] + [self.length]


def schedule_timeline(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int = 2,
    times: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 0.0),
) -> ScheduleTimeline:
    """Timeline of a schedule.

    Args:
        name: Key of ``SCHEDULE_FACTS``.
        num_ranks, num_microbatches: Size of the pipeline and number of microbatches.
        virtual_stages: Stages per rank, for schedules without a fixed number.
        times: Forward (F), backward for the input (I) and for the weights (W) of the layers of one rank and one
            microbatch, of which every stage takes its fraction, and the time from the end of an action to the arrival
            of its result on a neighboring rank.
    """
    stages = SCHEDULE_FACTS[name].virtual_stages or virtual_stages
    forward, backward_input, backward_weight = (time / stages for time in times[:3])
    stage_times = StageTimes.equal(num_ranks * stages, forward, backward_input, backward_weight, times[3])
    table = SCHEDULES[name](PipelineShape(num_ranks, num_microbatches, stages, stage_times))
    ends_s = action_ends_s(table, stage_times)
    rows = tuple(
        tuple(Box(action, ends_s[action] - stage_times.duration_s(action), ends_s[action]) for action in row)
        for row in table
    )
    return ScheduleTimeline(name, num_microbatches, stages, stage_times, rows)


def schedule_drawing(drawn: ScheduleTimeline, until: float) -> PipelineDrawing:
    """The schedule up to a time, for ``drawing_svg``; idle fractions are those of the whole schedule."""
    rows = []
    for rank, row in enumerate(drawn.rows):
        boxes = tuple(replace(box, end_s=min(box.end_s, until)) for box in row if box.start_s < until)
        rows.append(DrawnRank(rank, boxes, 1.0 - sum(box.duration_s for box in row) / drawn.length))
    return PipelineDrawing(drawn.name, drawn.length, 1, tuple(rows), unit="units")


def why_bubble(drawn: ScheduleTimeline) -> str:
    """Reason of the idle time of a schedule, with its numbers."""
    p, m, v = drawn.num_ranks, drawn.num_microbatches, drawn.virtual_stages
    times = drawn.times
    both = v * (times.forward_s[0] + times.backward_input_s[0] + times.backward_weight_s[0])
    fill = (
        f"The first microbatch reaches rank {p - 1} only after {p - 1} other forwards, and its gradient returns to "
        f"rank 0 only after {p - 1} other backwards."
    )
    if drawn.name == "naive":
        return f"{fill} Nothing else runs in between, so that one rank of {p} works at a time."
    if SCHEDULE_FACTS[drawn.name].splits_backward:
        return (
            f"{fill} Only the input gradient (I) is on that path. The weight gradient (W) is needed by no other rank, "
            f"so that ranks run it where they would wait: {drawn.idle:g} of {p * drawn.length:g} rank units stay idle."
        )
    if v > 1:
        return (
            f"{fill} A stage is {v} times smaller than with one stage per rank, and so is this wait: each rank idles "
            f"(p-1)(F+B)/v = {(p - 1) * both / v:g} units, if m is a multiple of p. More stages per rank send more "
            "activations between ranks, and keep more microbatches in flight."
        )
    return (
        f"{fill} Each rank therefore idles (p-1)(F+B) = {(p - 1) * both:g} units next to m(F+B) = {m * both:g} of "
        "work. More microbatches make the fraction smaller, not the bubble shorter."
    )
