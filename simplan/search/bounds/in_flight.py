"""Candidate peak points of a pipeline rank, with the work in flight at each."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.program.action import ActionKind
from simplan.program.schedules import SCHEDULES, PipelineShape
from simplan.program.tables.custom_schedule import custom_schedule

_Integers = NDArray[np.int64]
_F, _B, _I, _W = range(4)
_KINDS = {
    ActionKind.FORWARD: _F,
    ActionKind.BACKWARD: _B,
    ActionKind.BACKWARD_INPUT: _I,
    ActionKind.BACKWARD_WEIGHT: _W,
}
_AHEAD = 3  # stages that FSDP unshards ahead, as in ``simplan.program.tables.complete``
_ROUNDS = 3  # rounds of one microbatch per rank, which fill every schedule except GPipe


class Instants(NamedTuple):
    """Candidate peak points of one rank, each at the start of an action.

    Arrays have the shape ``(instants, stages of the rank)`` unless another shape is given.

    Attributes:
        rank: Pipeline rank.
        stages: ``(stages of the rank,)`` Stages of the rank, ascending.
        in_flight: Microbatches between forward and backward (dgrad, if backward is split).
        between: Microbatches between dgrad and wgrad of a split backward.
        adding_up: 1 where gradients of some but not all microbatches are accumulated, else 0.
        forwards, backwards: Completed passes; a split backward counts once its dgrad is done.
        begins: 1 for the stage whose unsplit backward starts, else 0.
        used: 1 for a stage with remaining compute, else 0.
        wanted: 1 for the next three different stages, which FSDP unshards ahead, else 0.
        late: ``(instants, 1)`` True in the second half of the step.
        forwards_first: True if all forwards precede all backwards.
    """

    rank: int
    stages: _Integers
    in_flight: _Integers
    between: _Integers
    adding_up: _Integers
    forwards: _Integers
    backwards: _Integers
    begins: _Integers
    used: _Integers
    wanted: _Integers
    late: NDArray[np.bool_]
    forwards_first: bool

    def of_longer(self, more: int) -> Instants:
        """Peak points of a step with ``more`` additional microbatches in the middle.

        The actions after a point of the second half are the same in both steps.
        """
        more_backwards = 0 if self.forwards_first else more * self.late
        return self._replace(
            in_flight=self.in_flight + (more * (self.forwards > 0) if self.forwards_first else 0),
            forwards=self.forwards + more * (self.late | self.forwards_first),
            backwards=self.backwards + more_backwards,
        )


def rank_instants(
    schedule: str, pp: int, num_microbatches: int, virtual_stages: int, ranks: tuple[int, ...]
) -> tuple[Instants, ...]:
    """Candidate peak points of some ranks of a pipeline.

    A long step uses the points of a shorter step: the same number of microbatches is in flight, and more have been
    sent. For GPipe the number in flight grows with the step.
    """
    few = _few(schedule, pp, num_microbatches)
    instants = (_instants(schedule, pp, few, virtual_stages, rank) for rank in ranks)
    return tuple(of_rank.of_longer(num_microbatches - few) for of_rank in instants)


@lru_cache(maxsize=32)
def _computations(schedule: str, pp: int, num_microbatches: int, virtual_stages: int) -> list[tuple[_Integers, ...]]:
    """By rank, kinds and stages of its compute actions."""
    make = SCHEDULES.get(schedule) or custom_schedule(schedule)
    table = make(PipelineShape(pp, num_microbatches, virtual_stages))
    rows = ([action for action in row if action.kind in _KINDS] for row in table)
    return [
        (
            np.array([_KINDS[computation.kind] for computation in row]),
            np.array([computation.stage for computation in row]),
        )
        for row in rows
    ]


def _few(schedule: str, pp: int, num_microbatches: int) -> int:
    """Microbatches of a shorter step that reaches the same maximum in flight."""
    facts = SCHEDULE_FACTS.get(schedule)
    if pp == 1:
        return min(num_microbatches, 3)
    if facts is None:
        return num_microbatches
    if facts.virtual_stages is None:  # rounds have the length of those in the long step, or one microbatch less
        num_rounds = max(1, num_microbatches // pp)
        return num_microbatches // num_rounds * min(num_rounds, _ROUNDS)
    return min(num_microbatches, _ROUNDS * pp + 1)


def _peaks(numbers: _Integers) -> tuple[int, int]:
    """Indices of the first and the last action that follow the maximum of ``numbers``."""
    end = len(numbers) - 1
    return min(int(np.argmax(numbers)) + 1, end), min(len(numbers) - int(np.argmax(numbers[::-1])), end)


@lru_cache(maxsize=4096)
def _instants(schedule: str, pp: int, num_microbatches: int, virtual_stages: int, rank: int) -> Instants:
    """Points: first backward, most microbatches saved, gradients of all stages, first stage with complete gradients."""
    kinds, stages = _computations(schedule, pp, num_microbatches, virtual_stages)[rank]
    stages_of_rank, place = np.unique(stages, return_inverse=True)
    completes = np.flatnonzero((kinds == _B) | (kinds == _W))
    first, last = np.zeros(len(stages_of_rank), np.int64), np.zeros(len(stages_of_rank), np.int64)
    last[place[completes]] = completes  # of equal places the last one stays
    first[place[completes[::-1]]] = completes[::-1]
    under_way = np.cumsum(np.select([kinds == _F, kinds == _W], [1, 0], -1))  # until the first part of their backward
    unfinished = np.cumsum(np.select([kinds == _F, kinds == _I], [1, 0], -1))
    with_gradients = np.cumsum(np.select([kinds == _F, kinds == _I, kinds == _W], [1, 1, -2], -1))  # which count twice
    backwards = np.flatnonzero((kinds == _B) | (kinds == _I))
    all_began = backwards[backwards > first.max()][:1]
    num_forwards = int((kinds == _F).sum())
    forwards_first = bool(np.all(kinds[:num_forwards] == _F))
    peak_times = {time for numbers in (under_way, unfinished, with_gradients) for time in _peaks(numbers)}
    times = sorted({int(backwards[0]), *peak_times, *all_began.tolist(), int(last.min())})
    done = [
        np.stack([np.bincount(place[:t][kinds[:t] == kind], minlength=len(stages_of_rank)) for t in times])
        for kind in range(4)
    ]
    forwards, wholes, inputs, weights = done
    completed = wholes + weights
    begins, used, wanted = (np.zeros((len(times), len(stages_of_rank)), np.int64) for _ in range(3))
    for row, time in enumerate(times):
        begins[row, place[time]] = kinds[time] == _B
        ahead = list(dict.fromkeys(place[time:].tolist()))
        used[row, ahead] = 1
        wanted[row, ahead[:_AHEAD]] = 1
    adding_up = (completed > 0) & (completed < forwards.max())
    return Instants(
        rank,
        stages_of_rank,
        forwards - wholes - inputs,
        inputs - weights,
        adding_up.astype(np.int64),
        forwards,
        wholes + inputs,
        begins,
        used,
        wanted,
        np.array([[2 * time >= len(kinds)] for time in times]),
        forwards_first,
    )
