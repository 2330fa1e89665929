"""Candidate counts and near misses of a search."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simplan.plan.plan import ParallelPlan
from simplan.search.candidates import plan_order
from simplan.search.incumbents import Incumbents

__all__ = ["MORE_MEMORY", "ROUNDING", "InfeasiblePlan", "Limits", "OnProgress", "Statistics", "Waiting", "rounded"]

MORE_MEMORY = 1.1
"""A plan nearly fits if it needs at most this factor times the usable memory."""
ROUNDING = 1 - 1e-9
"""Tolerance for comparing times that were summed in different orders."""
_MOST_NEARLY = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints on a plan.

    Attributes:
        device_bytes: Usable device memory; None if unknown.
        step_time_s: Deadline of a step; None for none.
        num_misses: Number of near misses to keep.
    """

    device_bytes: int | None
    step_time_s: float | None = None
    num_misses: int = 3


class InfeasiblePlan(NamedTuple):
    """A plan that exceeds only the memory or the deadline, sorted by the excess, then by plan fields.

    Attributes:
        lacking: Bytes over the memory limit; for plans that fit, seconds over the deadline.
        order: ``plan_order`` of the plan.
        plan: The plan.
        device_bytes: Memory that the worst device needs.
        step_time_s: Step time in seconds; None if the plan does not fit.
    """

    lacking: float
    order: tuple[Any, ...]
    plan: ParallelPlan
    device_bytes: int
    step_time_s: float | None = None

    @classmethod
    def of(
        cls, lacking: float, plan: ParallelPlan, device_bytes: int, step_time_s: float | None = None
    ) -> InfeasiblePlan:
        """Make a miss with its sort key."""
        return cls(lacking, plan_order(plan), plan, device_bytes, step_time_s)


class Waiting(NamedTuple):
    """A plan without a simulated time, sorted by its bounds on first objective and time, then by plan fields.

    Attributes:
        value: Lower bound on the first objective.
        step_time_s: Lower bound on the step time.
        order: ``plan_order`` of the plan.
        plan: The plan.
    """

    value: float
    step_time_s: float
    order: tuple[Any, ...]
    plan: ParallelPlan


@dataclass(slots=True)
class Statistics:
    """Candidate counts and near misses of a search.

    Attributes:
        rejected: Rejected candidates by rule, including memory and deadline.
        bounded: Pruned candidates.
        timed: Candidates with a simulated time.
        misses: Nearest plans that do not fit.
        late: Nearest plans that fit and miss the deadline.
        nearly: Plans that may fit with ``MORE_MEMORY`` times the memory, those with the lowest bounds.
        num_misses: Number of near misses to keep, per kind.
    """

    num_misses: int = 3
    rejected: Counter[str] = field(default_factory=Counter)
    bounded: int = 0
    timed: int = 0
    misses: list[InfeasiblePlan] = field(default_factory=list)
    late: list[InfeasiblePlan] = field(default_factory=list)
    nearly: list[Waiting] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Number of candidates rejected, pruned or timed."""
        return self.rejected.total() + self.bounded + self.timed

    def almost(self, nearly: Iterable[Waiting]) -> None:
        """Add candidates that may fit with ``MORE_MEMORY`` times the memory."""
        self.nearly = heapq.nsmallest(_MOST_NEARLY, [*self.nearly, *nearly])

    def is_far(self, lacking: float) -> bool:
        """True if ``num_misses`` plans are closer to fitting than one that lacks ``lacking`` bytes."""
        return len(self.misses) == self.num_misses and lacking > self.misses[-1].lacking

    def missed(self, misses: Iterable[InfeasiblePlan]) -> None:
        """Add near misses that were already counted as rejected."""
        self.misses = heapq.nsmallest(self.num_misses, [*self.misses, *misses])

    def too_large(self, misses: Iterable[InfeasiblePlan], far: int = 0) -> None:
        """Count candidates that do not fit: near misses, and ``far`` others."""
        found = list(misses)
        self.rejected["memory"] += len(found) + far
        self.missed(found)

    def is_later(self, least_time_s: float, deadline_s: float) -> bool:
        """True if ``num_misses`` plans are closer to the deadline than one of at least ``least_time_s``."""
        return len(self.late) == self.num_misses and least_time_s - deadline_s > self.late[-1].lacking

    def too_late(self, number: int, misses: Iterable[InfeasiblePlan] = ()) -> None:
        """Count ``number`` candidates beyond the deadline; ``misses`` are those with a known time."""
        self.rejected["max_step_time_s"] += number
        self.late = heapq.nsmallest(self.num_misses, [*self.late, *misses])


OnProgress = Callable[[Statistics, Incumbents], None]


def rounded(step_time_s: float) -> float:
    """Round to 12 digits, so that sums of the same numbers in another order are equal.

    >>> rounded(0.1 + 0.2)
    0.3
    """
    return float(f"{step_time_s:.12g}")
