"""A schedule on a tiny pipeline with equal stages and zero-cost communication. For learning, not for planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.program.action import Action, ActionKind
from simplan.program.schedules import SCHEDULES, PipelineShape
from simplan.program.schedules.bubble import action_ends_s

__all__ = ["CLOSED_FORMS", "Lesson", "LessonBox", "lesson"]

CLOSED_FORMS: Mapping[str, str] = {
    "naive": "(p-1)/p",
    "gpipe": "(p-1)/(m+p-1)",
    "1f1b": "(p-1)/(m+p-1)",
    "interleaved_1f1b": "(p-1)/(v m+p-1)",
}
"""Bubble fraction in closed form, for equal stages and zero-cost communication; m a multiple of p if interleaved."""


@dataclass(frozen=True, slots=True)
class LessonBox:
    """One action of one rank, in units of the time of a forward."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Lesson:
    """A schedule, step by step.

    Attributes:
        name: Name of the schedule.
        num_ranks: Number of pipeline ranks, p.
        num_microbatches: Number of microbatches, m.
        virtual_stages: Number of stages per rank, v.
        boxes: Actions by rank, then by time.
        length: Time from the first start to the last end.
        bubble_fraction: Fraction of ``length`` in which ranks idle, mean over ranks.
        most_in_flight: Maximum number of microbatches in flight per rank, counted per stage.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    virtual_stages: int
    boxes: tuple[LessonBox, ...]
    length: float
    bubble_fraction: float
    most_in_flight: tuple[int, ...]

    def in_flight(self, rank: int, time: float) -> int:
        """Microbatches in flight on a rank at a time: from the start of F to the end of B, or of W."""
        return sum(box.start <= time for box in self.boxes if box.rank == rank and _holds(box)) - sum(
            box.end <= time for box in self.boxes if box.rank == rank and _frees(box)
        )


def lesson(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 2) -> Lesson:
    """Computes the timeline of a schedule.

    Args:
        name: Key of ``SCHEDULE_FACTS``.
        num_ranks, num_microbatches: Size of the pipeline and number of microbatches.
        virtual_stages: Stages per rank, for schedules without a fixed number.
    """
    stages = SCHEDULE_FACTS[name].virtual_stages or virtual_stages
    shape = PipelineShape(num_ranks, num_microbatches, stages)
    table, times = SCHEDULES[name](shape), shape.stage_times
    ends = action_ends_s(table, times)
    boxes = tuple(
        LessonBox(rank, action, ends[action] - times.duration_s(action), ends[action])
        for rank, row in enumerate(table)
        for action in row
    )
    length = max(ends.values())
    busy = sum(box.end - box.start for box in boxes)
    bare = Lesson(name, num_ranks, num_microbatches, stages, boxes, length, 1 - busy / (num_ranks * length), ())
    instants = sorted({box.start for box in boxes})
    most = tuple(max(bare.in_flight(rank, time) for time in instants) for rank in range(num_ranks))
    return Lesson(name, num_ranks, num_microbatches, stages, boxes, length, bare.bubble_fraction, most)


def _holds(box: LessonBox) -> bool:
    return box.action.kind is ActionKind.FORWARD


def _frees(box: LessonBox) -> bool:
    return box.action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
