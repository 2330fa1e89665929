"""Which plans of a list a search shows, found with a look at all of them at once."""

from __future__ import annotations

from simplan.spec.plan import ParallelPlan

__all__ = ["Numbers", "shown"]

Numbers = tuple[ParallelPlan, int, float]
"""A plan, its memory and its time."""


def shown(ascending: list[Numbers], *, alone: bool = False) -> list[tuple[ParallelPlan, int, float, int]]:
    """Plans of which none before is alike and as good, the simplest of each group, and how many are as good.

    Args:
        ascending: Plans, the best first.
        alone: Only plans that are equal in all are as good.
    """
    left, found = list(ascending), []
    while left:
        first = left[0]
        group = [one for one in left if likeness(one[0]) == likeness(first[0]) and is_as_good(one, first, alone=alone)]
        left = [one for one in left if one not in group]
        plan, size, seconds = min(group, key=lambda n: (n[0].virtual_stages, n[0].recompute != "none", n[1], n[2]))
        found.append((plan, size, seconds, len(group) - 1))
    return sorted(found, key=lambda n: (n[1], n[2]) if alone else (n[2], n[1]))


def is_as_good(one: Numbers, first: Numbers, *, alone: bool) -> bool:
    return one[1:] == first[1:] if alone else one[2] <= 1.001 * first[2]


def likeness(plan: ParallelPlan) -> tuple[int, ...]:
    return plan.dp, plan.tp, plan.cp, plan.ep, plan.pp, plan.microbatch_size
