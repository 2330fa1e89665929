"""The best so far and the front so far: all that a search remembers of the plans that it has timed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from simplan.search.candidate import Candidate
from simplan.search.objective import Goal

__all__ = ["Keep", "Timed"]


class Timed(NamedTuple):
    """A candidate that fits, with its numbers. Order: the first objective, then time, devices, memory, the plan."""

    value: float
    step_time_s: float
    num_devices: int
    device_bytes: int
    candidate: Candidate


class Keep:
    """The best ``top`` candidates by the first objective, and the Pareto front of two.

    Args:
        goal: The objectives.
        top: How many to rank.
    """

    def __init__(self, goal: Goal, top: int) -> None:
        self.goal, self._top = goal, top
        self.ranked: list[Timed] = []
        self._front: list[tuple[float, float, Timed]] = []  # the first value rises, the second falls

    @property
    def front(self) -> list[Timed]:
        """Candidates that none is better than in both objectives, by the first; empty with one objective.

        Of candidates equal in both, one is kept: the first in the order of ``Timed``.
        """
        return [timed for _, _, timed in self._front]

    @property
    def kept(self) -> list[Timed]:
        """All that is remembered."""
        return list(dict.fromkeys([*self.ranked, *self.front]))

    def add(self, candidate: Candidate, device_bytes: int, step_time_s: float) -> None:
        """Takes note of a candidate."""
        num_devices = candidate.num_devices
        values = self.goal.values(num_devices, device_bytes, step_time_s)
        timed = Timed(values[0], step_time_s, num_devices, device_bytes, candidate)
        self._rank(timed)
        if len(values) == 2:
            self._pareto(*values, timed)

    def merge(self, kept: list[Timed]) -> None:
        """Takes note of what another search has kept."""
        for timed in kept:
            if timed not in self.ranked:
                self.add(timed.candidate, timed.device_bytes, timed.step_time_s)

    def is_hopeless(self, num_devices: int, device_bytes: int, least_time_s: float) -> bool:
        """Whether no candidate of a time of at least ``least_time_s`` could be kept.

        Every objective grows with the time or ignores it, so its value at the bound is a bound; and a candidate that
        is equal to what is kept is never hopeless, so ties are broken by the plan alone.
        """
        values = self.goal.values(num_devices, device_bytes, least_time_s)
        if len(self.ranked) < self._top or (values[0], least_time_s) <= self.ranked[-1][:2]:
            return False
        return len(values) == 1 or self._is_dominated(*values)

    def _rank(self, timed: Timed) -> None:
        if len(self.ranked) == self._top and timed >= self.ranked[-1]:
            return
        insort(self.ranked, timed)
        del self.ranked[self._top :]

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
