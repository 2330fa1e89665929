"""What a search has to find, from a look at the prediction of every plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.search import SearchSpace
from simplan.search.statistics import rounded
from simplan.units import GIB
from tests.search.jobs import plans_of

Row = tuple[ParallelPlan, int, float]
"""A plan, bytes of its worst device with all that the allocator would like, and seconds of its step to 12 digits."""


@cache
def every_plan(job: Job, space: SearchSpace) -> tuple[Row, ...]:
    """All plans of a space that keep the rules, by ``predict``."""
    device = job.cluster.device.model_copy(update={"memory_bytes": 80 * GIB})
    roomy = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
    return tuple((plan, *_numbers(roomy.with_plan(plan))) for plan in plans_of(job, space))


@cache
def _numbers(job: Job) -> tuple[int, float]:
    """Bytes and seconds by ``predict``; spaces overlap, and their jobs differ in the memory of devices."""
    prediction = predict(job)
    return max(rank.device_bytes for rank in prediction.memory), rounded(prediction.step_time_s)


def shown(ascending: list[Row], *, alone: bool = False) -> list[tuple[ParallelPlan, int, float, int]]:
    """Plans of which none before is alike and as good, the simplest of each group, and how many are as good.

    Args:
        ascending: Plans, the best first.
        alone: Only plans that are equal in all are as good.
    """
    left, groups = list(ascending), []
    while left:
        first = left[0]
        group = [row for row in left if _likeness(row[0]) == _likeness(first[0]) and _as_good(row, first, alone=alone)]
        left = [row for row in left if row not in group]
        plan, size, seconds = min(group, key=lambda n: (n[0].virtual_stages, n[0].recompute != "none", n[1], n[2]))
        groups.append((plan, size, seconds, len(group) - 1))
    return sorted(groups, key=lambda n: (n[1], n[2]) if alone else (n[2], n[1]))


def front(rows: list[Row]) -> set[tuple[int, float]]:
    """Bytes and seconds of plans that none is better than in both, and as good in one."""
    numbers = {row[1:] for row in rows}
    return {
        (size, seconds)
        for size, seconds in numbers
        if not any(a <= size and b <= seconds and (a, b) != (size, seconds) for a, b in numbers)
    }


def _as_good(row: Row, first: Row, *, alone: bool) -> bool:
    return row[1:] == first[1:] if alone else row[2] <= 1.001 * first[2]


def _likeness(plan: ParallelPlan) -> tuple[int, ...]:
    return plan.dp, plan.tp, plan.cp, plan.ep, plan.pp, plan.microbatch_size
