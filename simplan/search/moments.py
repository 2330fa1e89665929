"""Moments of a step at which the first and the last rank of a pipeline hold much: what is under way then."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.action import ActionKind
from simplan.program.table import plan_table
from simplan.search.candidate import Candidate
from simplan.sim.pipeline.orders import COMPILED_SCHEDULES, B, F, I, W, compute_order

__all__ = ["Moment", "RankMoments", "end_moments"]

_Integers = NDArray[np.int64]
_KINDS = {
    ActionKind.FORWARD: F,
    ActionKind.BACKWARD: B,
    ActionKind.BACKWARD_INPUT: I,
    ActionKind.BACKWARD_WEIGHT: W,
}
_AHEAD = 3  # as in ``simplan.program.complete``


class Moment(NamedTuple):
    """What is under way when an action of a rank begins, by stage of the rank.

    Attributes:
        in_flight: Microbatches between forward and backward, or its first part.
        between: Microbatches between the two parts of a backward.
        adding_up: Whether gradients of some microbatches, but not of all, have been made: 1 or 0.
        backward: The stage, of the rank's own, whose whole backward begins; None where something else does.
        wanted: The next three different stages of the rank, which FSDP gathers ahead: 1 or 0.
    """

    in_flight: _Integers
    between: _Integers
    adding_up: _Integers
    backward: int | None
    wanted: _Integers


class RankMoments(NamedTuple):
    """Moments of one rank.

    Attributes:
        stages: Its stages, ascending.
        moments: When its first backward begins, when most microbatches are under way, when all of its stages have made
            gradients, and when the last backward of the stage begins that is first done with all.
    """

    stages: _Integers
    moments: tuple[Moment, ...]


def end_moments(candidate: Candidate, many: int) -> tuple[RankMoments, ...]:
    """Moments of the first and the last rank of a candidate's pipeline.

    Args:
        candidate: The plan.
        many: Its microbatches.
    """
    ends = sorted({0, candidate.pp - 1})
    if candidate.schedule in COMPILED_SCHEDULES:
        order = compute_order(candidate.schedule, candidate.pp, many, candidate.virtual_stages)
        rows = [(order.kind[rank, : order.length], order.stage[rank, : order.length]) for rank in ends]
        return tuple(_moments(kinds, stages) for kinds, stages in rows)
    table = plan_table(candidate.plan(), many)
    found = []
    for rank in ends:
        row = [(_KINDS[action.kind], action.stage) for action in table[rank] if action.kind in _KINDS]
        found.append(_moments(*np.array(row).T))
    return tuple(found)


def _moments(kinds: NDArray[np.integer], stages: NDArray[np.integer]) -> RankMoments:
    own, place = np.unique(stages, return_inverse=True)
    completes = np.flatnonzero((kinds == B) | (kinds == W))
    first, last = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
    last[place[completes]] = completes  # of equal places the last one stays
    first[place[completes[::-1]]] = completes[::-1]
    under_way = np.cumsum(np.select([kinds == F, kinds == I], [1, 0], -1))
    backwards = np.flatnonzero((kinds == B) | (kinds == I))
    all_began = backwards[backwards > first.max()][:1]
    most = min(int(np.argmax(under_way)) + 1, len(kinds) - 1)
    times = sorted({int(backwards[0]), most, *all_began.tolist(), int(last.min())})
    return RankMoments(own, tuple(_moment(kinds, place, len(own), time) for time in times))


def _moment(kinds: NDArray[np.integer], place: _Integers, num_stages: int, time: int) -> Moment:
    done = [np.bincount(place[:time][kinds[:time] == kind], minlength=num_stages) for kind in (F, B, I, W)]
    forwards, wholes, inputs, weights = done
    completed = wholes + weights
    adding_up = (completed > 0) & (completed < forwards.max())
    backward = int(place[time]) if kinds[time] == B else None
    wanted = np.zeros(num_stages, np.int64)
    ahead = place[time:]
    while len(ahead) and wanted.sum() < _AHEAD:
        wanted[ahead[0]] = 1
        ahead = ahead[ahead != ahead[0]]
    return Moment(forwards - wholes - inputs, inputs - weights, adding_up.astype(np.int64), backward, wanted)
