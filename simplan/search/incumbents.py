"""The best plans so far and the front so far: all that a search remembers of the plans that it has timed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable
from typing import Any, NamedTuple, get_args

from simplan.plan.plan import ParallelPlan, Recompute
from simplan.search.candidates import plan_order
from simplan.search.objective import Goal

__all__ = ["NOISE", "Group", "Incumbents", "Timed"]

NOISE = 1e-3
"""Of plans whose times differ by no more than this part nobody knows which is faster."""
_RECOMPUTES = get_args(Recompute)  # the least first
_ALL = float("inf")
_SELDOM = 16  # ranks are found anew when one in so many is new


class Timed(NamedTuple):
    """A plan that fits, with its numbers. Order: the first objective, then time, devices, memory, the plan's fields.

    Attributes:
        value: Of the first objective.
        step_time_s: Time of a step.
        num_devices: Devices it needs.
        device_bytes: Memory of the worst device.
        order: Of the plan, as of ``plan_order``.
        plan: The plan.
    """

    value: float
    step_time_s: float
    num_devices: int
    device_bytes: int
    order: tuple[Any, ...]
    plan: ParallelPlan


class Group(NamedTuple):
    """Plans that are as good as each other, and alike: as many ranks on every axis, as large microbatches.

    Attributes:
        shown: The simplest: of the fewest stages a rank, then least recomputation, then least memory.
        others: The others, in the order of ``Timed``.
    """

    shown: Timed
    others: tuple[Timed, ...]


class Incumbents:
    """The best ``top`` groups of plans by the first objective, and the Pareto front of two.

    Args:
        goal: The objectives.
        top: How many to rank.
    """

    def __init__(self, goal: Goal, top: int) -> None:
        self.goal, self._top = goal, top
        self._known: dict[ParallelPlan, tuple[int, float]] = {}
        self._near: list[Timed] = []  # all that may be in a group, ascending
        self._groups: list[Group] = []
        self._cut: tuple[float, float] | None = None  # value and time of the last that may be; None while all may
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
    def shown(self) -> list[Timed]:
        """What the answer rests on: one plan of each group, the first of each, and the front."""
        firsts = [min((group.shown, *group.others)) for group in self.groups]
        return list(dict.fromkeys([*self.ranked, *firsts, *self.front]))

    def add(self, plan: ParallelPlan, device_bytes: int, step_time_s: float) -> None:
        """Takes note of a plan."""
        self._known[plan] = device_bytes, step_time_s
        self._add(plan, device_bytes, step_time_s)

    def correct(self, plan: ParallelPlan, numbers: tuple[int, float] | None) -> None:
        """Gives a plan its exact numbers, device bytes and seconds, or lets go of it as it does not fit after all.

        What it had displaced is looked at again. Whoever has left out plans by what was known has to ask again.
        """
        del self._known[plan]
        if numbers is not None:
            self._known[plan] = numbers
        self._near, self._groups, self._cut, self._new, self._front = [], [], None, 0, []
        for other, of_other in self._known.items():
            self._add(other, *of_other)

    def _add(self, plan: ParallelPlan, device_bytes: int, step_time_s: float) -> None:
        num_devices = plan.num_devices
        values = self.goal.values(num_devices, device_bytes, step_time_s)
        timed = Timed(values[0], step_time_s, num_devices, device_bytes, plan_order(plan), plan)
        self._rank(timed)
        if len(values) == 2:
            self._pareto(*values, timed)

    def is_hopeless(self, num_devices: int, device_bytes: int, least_time_s: float) -> bool:
        """Whether no plan of a time of at least ``least_time_s`` could be kept.

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
            group = started.get(_likeness(timed.plan))
            if group is None or not self._is_as_good(timed, group[0]):
                if len(groups) == self._top:
                    continue
                group = started[_likeness(timed.plan)] = []
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


def _likeness(plan: ParallelPlan) -> Hashable:
    """What plans of one group have in common."""
    return plan.dp, plan.tp, plan.cp, plan.ep, plan.pp, plan.microbatch_size


def _group(alike: list[Timed]) -> Group:
    shown = min(alike, key=_complexity)
    return Group(shown, tuple(timed for timed in alike if timed is not shown))


def _complexity(timed: Timed) -> tuple[object, ...]:
    plan = timed.plan
    again = _RECOMPUTES.index(plan.recompute), len(plan.recompute_modules or ()), plan.recompute_layers or _ALL
    return plan.virtual_stages, *again, timed.device_bytes, timed
