"""Candidate counts and near misses of a search."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simplan.plan.plan import ParallelPlan
from simplan.search.space import SearchedOptions

MORE = 1.1
"""Factor by which a resource is increased to find its effect; a plan that fits with 10% more memory nearly fits."""
ROUNDING = 1 - 1e-9
"""Tolerance for comparing times that were summed in different orders."""
_MAX_NEAR_MISSES = 256
_NUM_MISSES = 3  # near misses to keep, per kind


class InfeasiblePlan(NamedTuple):
    """A plan that exceeds only the memory or the deadline, sorted by the excess, then by plan fields.

    Attributes:
        lacking: Bytes over the memory limit; for plans that fit, seconds over the deadline.
        device_bytes: Memory that the worst device needs.
        step_time_s: Step time in seconds; None if the plan does not fit.
        options: Searched options of the software.
    """

    lacking: float
    order: tuple[Any, ...]
    plan: ParallelPlan
    device_bytes: int
    step_time_s: float | None = None
    options: SearchedOptions = ()


class Waiting(NamedTuple):
    """A plan without a simulated time, sorted by its bounds on first objective and time, then by plan fields.

    Attributes:
        value: Lower bound on the first objective.
        step_time_s: Lower bound on the step time.
        options: Searched options of the software.
    """

    value: float
    step_time_s: float
    order: tuple[Any, ...]
    plan: ParallelPlan
    options: SearchedOptions = ()


@dataclass(slots=True)
class Statistics:
    """Candidate counts and near misses of a search.

    Attributes:
        rejected: Rejected candidates by rule, including memory and deadline.
        bounded: Pruned candidates.
        timed: Candidates with a simulated time.
        in_headroom: Candidates rejected for memory that the headroom of the search may hold.
        misses: Nearest plans that do not fit.
        late: Nearest plans that fit and miss the deadline.
        nearly: Plans that may fit with ``MORE`` times the memory, those with the lowest bounds.
    """

    rejected: Counter[str] = field(default_factory=lambda: Counter(memory=0, max_step_time_s=0))
    bounded: int = 0
    timed: int = 0
    in_headroom: int = 0
    misses: list[InfeasiblePlan] = field(default_factory=list)
    late: list[InfeasiblePlan] = field(default_factory=list)
    nearly: list[Waiting] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Number of candidates rejected, pruned or timed."""
        return self.rejected.total() + self.bounded + self.timed

    @property
    def rejected_by_rules(self) -> int:
        """Number of candidates that violate a rule."""
        return self.rejected.total() - self.rejected["memory"] - self.rejected["max_step_time_s"]

    def almost(self, nearly: Iterable[Waiting]) -> None:
        """Add candidates that may fit with ``MORE`` times the memory."""
        self.nearly = heapq.nsmallest(_MAX_NEAR_MISSES, [*self.nearly, *nearly])

    def is_far(self, lacking: float) -> bool:
        """True if enough plans are closer to fitting than one that lacks ``lacking`` bytes."""
        return len(self.misses) == _NUM_MISSES and lacking > self.misses[-1].lacking

    def missed(self, miss: InfeasiblePlan) -> None:
        """Add a near miss that was already counted as rejected."""
        self.misses = heapq.nsmallest(_NUM_MISSES, [*self.misses, miss])

    def is_later(self, lacking_s: float) -> bool:
        """True if enough plans are closer to the deadline than one that exceeds it by ``lacking_s``."""
        return len(self.late) == _NUM_MISSES and lacking_s > self.late[-1].lacking

    def too_late(self, miss: InfeasiblePlan) -> None:
        """Count a candidate that fits and exceeds the deadline."""
        self.rejected["max_step_time_s"] += 1
        self.late = heapq.nsmallest(_NUM_MISSES, [*self.late, miss])


def rounded(step_time_s: float) -> float:
    """Round to 12 digits, so that sums of the same numbers in another order are equal.

    >>> rounded(0.1 + 0.2)
    0.3
    """
    return float(f"{step_time_s:.12g}")
