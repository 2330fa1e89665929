"""Objectives of a search as numbers to minimize, and incumbents: the best plans and the Pareto front so far."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.prediction import training_run
from simplan.search.candidates import plan_order
from simplan.search.space import Objective, SearchedOptions, SearchSpace

NOISE = 1e-3
"""Relative difference of step times within which plans count as equally fast."""
_RECOMPUTES = get_args(Recompute)  # least recomputation first
_ALL = float("inf")
_REGROUP_INTERVAL = 16  # groups are remade once 1 in 16 near plans is new


# Each grows with the step time or does not depend on it, so its value at a lower bound of the time is a lower bound.
# For one batch, throughput per device is the inverse of device-seconds per step.
_VALUES: Mapping[Objective, Callable[[Any, Any, Any], Any]] = MappingProxyType(
    {
        "step_time": lambda num_devices, device_bytes, step_time_s: step_time_s,
        "tokens_per_s_per_device": lambda num_devices, device_bytes, step_time_s: step_time_s * num_devices,
        "num_devices": lambda num_devices, device_bytes, step_time_s: 1.0 * num_devices,
        "memory": lambda num_devices, device_bytes, step_time_s: 1.0 * device_bytes,
        "cost": lambda num_devices, device_bytes, step_time_s: step_time_s * num_devices,
    }
)


@dataclass(frozen=True, slots=True)
class Goal:
    """Objectives of a search, and the inputs to convert their values to reported units.

    Attributes:
        objectives: One objective, or the two of a Pareto front.
        tokens_per_step: Tokens per optimizer step; images for image models.
        dollars_per_device_hour, token_budget: As in ``SearchSpace``.
    """

    objectives: tuple[Objective, ...]
    tokens_per_step: int
    dollars_per_device_hour: float | None = None
    token_budget: float | None = None

    @classmethod
    def of(cls, space: SearchSpace, job: Job) -> Goal:
        """Make the goal that a space requests."""
        tokens = 1 if job.model.sample != "sequence" else job.model.seq_len
        tokens_per_step = job.training.global_batch_size * tokens
        return cls(space.goals, tokens_per_step, space.dollars_per_device_hour, space.token_budget)

    def values(self, num_devices: int, device_bytes: int, step_time_s: float) -> tuple[float, ...]:
        """Values to minimize, one per objective."""
        return tuple(_VALUES[name](num_devices, device_bytes, step_time_s) for name in self.objectives)

    def first_values(
        self, num_devices: NDArray[np.int64], device_bytes: NDArray[np.int64], step_time_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``(plans,)`` Values of the first objective."""
        return np.asarray(_VALUES[self.objectives[0]](num_devices, device_bytes, step_time_s))

    @property
    def follows_time(self) -> bool:
        """True if the first objective is proportional to the step time at a fixed number of devices."""
        return self.objectives[0] in ("step_time", "tokens_per_s_per_device", "cost")

    def tokens_per_s_per_device(self, num_devices: int, step_time_s: float) -> float:
        """Throughput per device, in tokens (or images) per second."""
        return self.tokens_per_step / step_time_s / num_devices

    def cost_dollars(self, num_devices: int, step_time_s: float) -> float | None:
        """Price in dollars of the steps that the token budget needs; None without a price or a budget."""
        if self.dollars_per_device_hour is None or self.token_budget is None:
            return None
        return training_run(
            self.token_budget,
            step_time_s,
            None,
            tokens_per_step=self.tokens_per_step,
            num_devices=num_devices,
            price_per_device_hour=self.dollars_per_device_hour,
        ).cost


class Timed(NamedTuple):
    """A plan that fits, sorted by first objective, step time, devices, memory and plan fields.

    Attributes:
        value: Value of the first objective.
        num_devices: Devices that the plan needs.
        device_bytes: Memory of the worst device.
        options: Searched options of the software.
    """

    value: float
    step_time_s: float
    num_devices: int
    device_bytes: int
    order: tuple[Any, ...]
    plan: ParallelPlan
    options: SearchedOptions = ()

    @property
    def key(self) -> tuple[ParallelPlan, SearchedOptions]:
        """Identity of the candidate."""
        return self.plan, self.options


class Group(NamedTuple):
    """Equivalent plans: the same degrees, microbatch size and software, and step times within 0.1%.

    Attributes:
        shown: The simplest plan: fewest stages per rank, then least recomputation, then least memory.
        others: The other plans, in the order of ``Timed``.
    """

    shown: Timed
    others: tuple[Timed, ...]


class Incumbents:
    """The best ``top`` groups of plans by the first objective, and the Pareto front of two.

    Args:
        top: Number of groups to rank.
    """

    def __init__(self, goal: Goal, top: int) -> None:
        self.goal, self._top = goal, top
        self._known: dict[tuple[ParallelPlan, SearchedOptions], tuple[int, float]] = {}
        self._near: list[Timed] = []  # plans that may be in a group, ascending
        self._groups: list[Group] = []
        self._cut: tuple[float, float] | None = None  # largest value and time that may be in a group; None for no limit
        self._new = 0  # plans added to _near since the groups were made
        self._front: list[tuple[float, float, Timed]] = []  # first value ascending, second descending
        self._value_noise = 1 + NOISE * goal.follows_time
        self._time_noise = 1 + NOISE * (goal.objectives[0] != "memory")

    @property
    def groups(self) -> list[Group]:
        """Best groups so far, best first."""
        if self._new:
            self._regroup()
        return self._groups

    @property
    def ranked(self) -> list[Timed]:
        """Shown plan of each group."""
        return [group.shown for group in self.groups]

    @property
    def is_full(self) -> bool:
        """True once there are as many groups as are ranked: they then prune candidates."""
        return len(self.groups) == self._top

    @property
    def front(self) -> list[Timed]:
        """Pareto front of both objectives, sorted by the first; empty with one objective.

        Of plans with equal values, the first in the order of ``Timed`` is kept.
        """
        return [timed for _, _, timed in self._front]

    @property
    def shown(self) -> list[Timed]:
        """Plans in the result: the shown and the fastest plan of each group, and the front."""
        firsts = [min((group.shown, *group.others)) for group in self.groups]
        return list(dict.fromkeys([*self.ranked, *firsts, *self.front]))

    def add(self, plan: ParallelPlan, device_bytes: int, step_time_s: float, options: SearchedOptions = ()) -> None:
        """Add a plan that fits."""
        self._known[plan, options] = device_bytes, step_time_s
        values = self.goal.values(plan.num_devices, device_bytes, step_time_s)
        timed = Timed(values[0], step_time_s, plan.num_devices, device_bytes, plan_order(plan), plan, options)
        if self._cut is None or timed[:2] <= self._cut:
            insort(self._near, timed)
            self._new += 1
        if len(values) == 2:
            self._pareto(*values, timed)

    def correct(self, plan: ParallelPlan, numbers: tuple[int, float] | None, options: SearchedOptions = ()) -> None:
        """Replace the numbers of a plan by exact ones, or remove the plan.

        Plans that it had displaced are considered again. Candidates pruned by the old numbers must be checked again.

        Args:
            numbers: Exact device bytes and step time in seconds; None removes the plan.
        """
        del self._known[plan, options]
        if numbers is not None:
            self._known[plan, options] = numbers
        self._near, self._groups, self._cut, self._new, self._front = [], [], None, 0, []
        for (other, its_options), of_other in list(self._known.items()):
            self.add(other, *of_other, its_options)

    def is_hopeless(self, num_devices: int, device_bytes: int, least_time_s: float) -> bool:
        """True if a plan with a step time of at least ``least_time_s`` cannot be kept.

        Every objective grows with the step time or ignores it, so its value at the bound is a lower bound. A candidate
        equal to a kept plan is never hopeless, so only plan fields break ties.
        """
        values = self.goal.values(num_devices, device_bytes, least_time_s)
        if self._new * _REGROUP_INTERVAL > len(self._near):
            self._regroup()
        if self._cut is None or (values[0], least_time_s) <= self._cut:
            return False
        return len(values) == 1 or self._is_dominated(*values)

    def _regroup(self) -> None:
        """Make the groups, each from its fastest plan on, and drop plans that can no longer be in a group.

        Further plans can only make the first plan of the last group faster.
        """
        started: dict[Hashable, list[Timed]] = {}
        groups: list[list[Timed]] = []
        for timed in self._near:
            group = started.get(_likeness(timed))
            if group is None or not self._is_as_good(timed, group[0]):
                if len(groups) == self._top:
                    continue
                group = started[_likeness(timed)] = []
                groups.append(group)
            group.append(timed)
        if len(groups) == self._top:
            last = groups[-1][0]
            self._cut = last.value * self._value_noise, last.step_time_s * self._time_noise
            del self._near[bisect_right(self._near, self._cut, key=itemgetter(slice(2))) :]
        self._groups = sorted(map(_group, groups))
        self._new = 0

    def _is_as_good(self, timed: Timed, first: Timed) -> bool:
        slower = timed.step_time_s > first.step_time_s * self._time_noise
        return not slower and timed.value <= first.value * self._value_noise

    def _is_dominated(self, first: float, second: float) -> bool:
        """True if a point of the front is at least as good in both values and better in one."""
        place = bisect_right(self._front, first, key=itemgetter(0)) - 1  # has the least second value up to ``first``
        if place < 0:
            return False
        other_first, other_second, _ = self._front[place]
        return other_second <= second and (other_first, other_second) != (first, second)

    def _pareto(self, first: float, second: float, timed: Timed) -> None:
        if self._is_dominated(first, second):
            return
        point = (first, second, timed)
        start = bisect_left(self._front, first, key=itemgetter(0))
        if start < len(self._front) and self._front[start][:2] == point[:2] and self._front[start] <= point:
            return
        end = start
        while end < len(self._front) and self._front[end][1] >= second:
            end += 1
        self._front[start:end] = [point]


def _likeness(timed: Timed) -> Hashable:
    """Key of a group: parallel degrees, microbatch size and options of the software."""
    plan = timed.plan
    return plan.dp, plan.tp, plan.cp, plan.ep, plan.pp, plan.microbatch_size, timed.options


def _group(alike: list[Timed]) -> Group:
    shown = min(alike, key=_complexity)
    return Group(shown, tuple(timed for timed in alike if timed is not shown))


def _complexity(timed: Timed) -> tuple[object, ...]:
    plan = timed.plan
    again = _RECOMPUTES.index(plan.recompute), len(plan.recompute_modules or ()), plan.recompute_layers or _ALL
    return plan.virtual_stages, *again, timed.device_bytes, timed
