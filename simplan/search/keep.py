"""The best so far and the front so far: all that a search remembers of the plans that it has timed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable
from typing import NamedTuple, get_args

from simplan.search.candidate import Candidate
from simplan.search.objective import Goal
from simplan.spec.plan import Recompute

__all__ = ["NOISE", "Group", "Keep", "Timed"]

NOISE = 1e-3
"""Of plans whose times differ by no more than this part nobody knows which is faster."""
_RECOMPUTES = get_args(Recompute)  # the least first
_ALL = float("inf")
_SELDOM = 16  # ranks are found anew when one in so many is new


class Timed(NamedTuple):
    """A candidate that fits, with its numbers. Order: the first objective, then time, devices, memory, the plan."""

    value: float
    step_time_s: float
    num_devices: int
    device_bytes: int
    candidate: Candidate


class Group(NamedTuple):
    """Plans that are as good as each other, and alike: as many ranks on every axis, as large microbatches.

    Attributes:
        shown: The simplest: of the fewest stages a rank, then least recomputation, then least memory.
        others: The others, in the order of ``Timed``.
    """

    shown: Timed
    others: tuple[Timed, ...]


class Keep:
    """The best ``top`` groups of candidates by the first objective, and the Pareto front of two.

    Args:
        goal: The objectives.
        top: How many to rank.
    """

    def __init__(self, goal: Goal, top: int) -> None:
        self.goal, self._top = goal, top
        self._near: list[Timed] = []  # all that may be in a group, ascending
        self._groups: list[Group] = []
        self._cut: tuple[float, float] | None = None  # value and time of the last that may be; None while all may
        self._before_near: list[Timed] = []
        self._before_front: list[tuple[float, float, Timed]] = []
        self._new = 0  # of what is near, how many came after the groups were made
        self._front: list[tuple[float, float, Timed]] = []  # the first value rises, the second falls
        self._value_noise = 1 + NOISE * goal.follows_time
        self._time_noise = 1 + NOISE * (goal.objectives[0] != "memory")

    @property
    def groups(self) -> list[Group]:
        """The best so far, best first."""
        if self._new:
            self._regroup()
        return self._groups

    @property
    def ranked(self) -> list[Timed]:
        """One plan of each group."""
        return [group.shown for group in self.groups]

    @property
    def front(self) -> list[Timed]:
        """Candidates that none is better than in both objectives, by the first; empty with one objective.

        Of candidates equal in both, one is kept: the first in the order of ``Timed``.
        """
        return [timed for _, _, timed in self._front]

    @property
    def kept(self) -> list[Timed]:
        """All that is remembered."""
        return list(dict.fromkeys([*self._near, *self.front]))

    def add(self, candidate: Candidate, device_bytes: int, step_time_s: float) -> None:
        """Takes note of a candidate."""
        num_devices = candidate.num_devices
        values = self.goal.values(num_devices, device_bytes, step_time_s)
        timed = Timed(values[0], step_time_s, num_devices, device_bytes, candidate)
        self._rank(timed)
        if len(values) == 2:
            self._pareto(*values, timed)

    def restart(self) -> None:
        """Forgets all that came since the search of the last number of devices began."""
        self._near, self._front, self._groups = list(self._before_near), list(self._before_front), []
        self._cut, self._new = None, len(self._near)

    def begin(self) -> None:
        """The search of another number of devices begins."""
        self._before_near, self._before_front = list(self._near), list(self._front)

    def merge(self, kept: list[Timed]) -> None:
        """Takes note of what another search has kept."""
        for timed in kept:
            place = bisect_left(self._near, timed)
            if self._near[place : place + 1] != [timed]:
                self.add(timed.candidate, timed.device_bytes, timed.step_time_s)

    def is_hopeless(self, num_devices: int, device_bytes: int, least_time_s: float) -> bool:
        """Whether no candidate of a time of at least ``least_time_s`` could be kept.

        Every objective grows with the time or ignores it, so its value at the bound is a bound; and a candidate that
        is equal to what is kept is never hopeless, so ties are broken by the plan alone.
        """
        values = self.goal.values(num_devices, device_bytes, least_time_s)
        if self._new * _SELDOM > len(self._near):
            self._regroup()
        if self._cut is None or (values[0], least_time_s) <= self._cut:
            return False
        return len(values) == 1 or self._is_dominated(*values)

    def _rank(self, timed: Timed) -> None:
        if self._cut is None or timed[:2] <= self._cut:
            insort(self._near, timed)
            self._new += 1

    def _regroup(self) -> None:
        """Makes groups, each from its fastest plan on, and lets go of what cannot be in one whatever comes.

        More plans only make the first of the last group faster.
        """
        started: dict[Hashable, list[Timed]] = {}
        groups: list[list[Timed]] = []
        for timed in self._near:
            group = started.get(_likeness(timed.candidate))
            if group is None or not self._is_as_good(timed, group[0]):
                if len(groups) == self._top:
                    continue
                group = started[_likeness(timed.candidate)] = []
                groups.append(group)
            group.append(timed)
        if len(groups) == self._top:
            last = groups[-1][0]
            self._cut = last.value * self._value_noise, last.step_time_s * self._time_noise
            del self._near[bisect_right(self._near, self._cut, key=_first_two) :]
        self._groups = sorted(map(_group, groups))
        self._new = 0

    def _is_as_good(self, timed: Timed, first: Timed) -> bool:
        slower = timed.step_time_s > first.step_time_s * self._time_noise
        return not slower and timed.value <= first.value * self._value_noise

    def _is_dominated(self, first: float, second: float) -> bool:
        """Whether a point of the front is at least as good in both values and better in one."""
        place = self._before(first)
        if place < 0:
            return False
        other_first, other_second, _ = self._front[place]
        return other_second <= second and (other_first, other_second) != (first, second)

    def _pareto(self, first: float, second: float, timed: Timed) -> None:
        if self._is_dominated(first, second):
            return
        point = (first, second, timed)
        start = bisect_left(self._front, first, key=_first)
        if start < len(self._front) and self._front[start][:2] == point[:2] and self._front[start] <= point:
            return
        end = start
        while end < len(self._front) and self._front[end][1] >= second:
            end += 1
        self._front[start:end] = [point]

    def _before(self, first: float) -> int:
        """The last point whose first value is at most so much: of those, it has the least second value; or -1."""
        return bisect_right(self._front, first, key=_first) - 1


def _first(point: tuple[float, float, Timed]) -> float:
    return point[0]


def _first_two(timed: Timed) -> tuple[float, float]:
    return timed[:2]


def _likeness(c: Candidate) -> Hashable:
    """What plans of one group have in common."""
    return c.dp, c.tp, c.cp, c.ep, c.pp, c.microbatch_size


def _group(alike: list[Timed]) -> Group:
    shown = min(alike, key=_complexity)
    return Group(shown, tuple(timed for timed in alike if timed is not shown))


def _complexity(timed: Timed) -> tuple[int, int, int, float, int, Timed]:
    c = timed.candidate
    again = _RECOMPUTES.index(c.recompute), len(c.recompute_modules), c.recompute_layers or _ALL
    return c.virtual_stages, *again, timed.device_bytes, timed
