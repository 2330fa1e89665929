"""What a search counts beside the best: where candidates went, and which nearly fit."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simplan.plan.plan import ParallelPlan
from simplan.search.candidates import plan_order
from simplan.search.incumbents import Incumbents

__all__ = ["MORE_MEMORY", "ROUNDING", "Limits", "Miss", "OnProgress", "Statistics", "Waiting", "rounded"]

MORE_MEMORY = 1.1
"""What nearly fits needs at most so many times what there is."""
ROUNDING = 1 - 1e-9
"""A bound or a deadline may be a sum in another order than the time it is compared with."""
_MOST_NEARLY = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep within.

    Attributes:
        device_bytes: Memory of a device that may be used; None when it is unknown.
        step_time_s: The deadline; None for none.
        num_misses: Nearest misses to remember.
    """

    device_bytes: int | None
    step_time_s: float | None = None
    num_misses: int = 3


class Miss(NamedTuple):
    """A plan that violated nothing but a limit. Order: what it lacks, then the plan's fields.

    Attributes:
        lacking: Bytes too many, or, where nothing is within the deadline, seconds too many.
        order: Of the plan, as of ``plan_order``.
        plan: The plan.
        device_bytes: What it needs.
        step_time_s: Its time; None when it does not fit.
    """

    lacking: float
    order: tuple[Any, ...]
    plan: ParallelPlan
    device_bytes: int
    step_time_s: float | None = None

    @classmethod
    def of(cls, lacking: float, plan: ParallelPlan, device_bytes: int, step_time_s: float | None = None) -> Miss:
        """A plan that lacks so much."""
        return cls(lacking, plan_order(plan), plan, device_bytes, step_time_s)


class Waiting(NamedTuple):
    """A plan that nobody has timed. Order: a bound on its first objective, then on its time, then the plan's fields.

    Attributes:
        value: Of the first objective, at least.
        step_time_s: Its time, at least.
        order: Of the plan, as of ``plan_order``.
        plan: The plan.
    """

    value: float
    step_time_s: float
    order: tuple[Any, ...]
    plan: ParallelPlan


@dataclass(slots=True)
class Statistics:
    """Where every candidate went.

    Attributes:
        rejected: By rule, memory and deadline among them.
        bounded: Could not have been kept.
        timed: The others.
        misses: The nearest that do not fit.
        late: The nearest that fit and are too slow.
        nearly: Of those that ``MORE_MEMORY`` would make fit, the ones with the least bounds.
        num_misses: How many misses of each kind to remember.
    """

    num_misses: int = 3
    rejected: Counter[str] = field(default_factory=Counter)
    bounded: int = 0
    timed: int = 0
    misses: list[Miss] = field(default_factory=list)
    late: list[Miss] = field(default_factory=list)
    nearly: list[Waiting] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Candidates dealt with."""
        return self.rejected.total() + self.bounded + self.timed

    def almost(self, nearly: Iterable[Waiting]) -> None:
        """Candidates that a little more memory would make fit."""
        self.nearly = heapq.nsmallest(_MOST_NEARLY, [*self.nearly, *nearly])

    def is_far(self, lacking: float) -> bool:
        """Whether enough misses are nearer than one that lacks at least so much."""
        return len(self.misses) == self.num_misses and lacking > self.misses[-1].lacking

    def missed(self, misses: Iterable[Miss]) -> None:
        """Candidates that do not fit and were counted before."""
        self.misses = heapq.nsmallest(self.num_misses, [*self.misses, *misses])

    def too_large(self, misses: Iterable[Miss], far: int = 0) -> None:
        """Candidates that do not fit, and how many more that do not by far."""
        found = list(misses)
        self.rejected["memory"] += len(found) + far
        self.missed(found)

    def is_later(self, least_time_s: float, deadline_s: float) -> bool:
        """Whether enough that fit are nearer to the deadline than one of at least such a time."""
        return len(self.late) == self.num_misses and least_time_s - deadline_s > self.late[-1].lacking

    def too_late(self, number: int, misses: Iterable[Miss] = ()) -> None:
        """Candidates beyond the deadline; misses are those whose time is known."""
        self.rejected["max_step_time_s"] += number
        self.late = heapq.nsmallest(self.num_misses, [*self.late, *misses])


OnProgress = Callable[[Statistics, Incumbents], None]


def rounded(step_time_s: float) -> float:
    """To 12 digits: sums of the same numbers in another order are one time, and no front is made of their difference.

    >>> rounded(0.1 + 0.2)
    0.3
    """
    return float(f"{step_time_s:.12g}")
