"""A rule: name, plan fields that the rule reads, and problems of a job that violates it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType

from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.software.software import SoftwareSpec
from simplan.wording import either, nearest_divisors

_MADE_OF: Mapping[str, str] = MappingProxyType(
    {
        "dp": "dp_replicate dp_shard",
        "num_stages": "pp virtual_stages",
        "shards_parameters": "zero_stage dp_shard cp",
        "shards_optimizer_only": "zero_stage dp_shard cp",
        "experts_apart": "ep etp tp",
        "expert_ranks": "dp_replicate dp_shard cp tp etp",
    }
)
"""Properties of a plan that ``reads`` may name, and the fields that each depends on."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a job.

    Attributes:
        name: Stable name, also the key in the table of plans that a search rejected.
        reads: Plan fields that the rule reads; empty for a rule about the rest of a job.
        problems: Yields the violations of a job; empty when the rule holds. Accepts any plan, even one that violates
            other rules.
        modelled: True when a job that violates the rule is impossible; False when simplan does not model such jobs yet.
        summary: The rule in one sentence without numbers.
        outside_torch: Summary for software that does not run on torch, without torch's own limits; empty for
            ``summary``.
        after_others: Check the rule only for jobs that violate no other rule.
        reads_cluster: True when the rule reads the cluster, which the executor's ranks do not have.
    """

    name: str
    reads: frozenset[str]
    problems: Callable[[Job], Iterator[Problem]]
    modelled: bool
    summary: str
    outside_torch: str = ""
    after_others: bool = False
    reads_cluster: bool = False

    def in_words(self, software: SoftwareSpec) -> str:
        """Summary of the rule for users of a software."""
        return self.summary if software.runtime != "xla" else self.outside_torch or self.summary


_Check = Callable[[Job], Iterator[Problem]]


def rule(
    summary: str,
    *,
    reads: str = "",
    outside_torch: str = "",
    after_others: bool = False,
    reads_cluster: bool = False,
    modelled: bool = True,
) -> Callable[[_Check], Rule]:
    """Makes a rule from a function that yields the violations of a job; the rule has the function's name.

    Args:
        summary, outside_torch, after_others, reads_cluster, modelled: As in ``Rule``.
        reads: Names of fields of the plan, separated by spaces, or of properties that are made of fields.
    """
    fields = frozenset(field for name in reads.split() for field in _MADE_OF.get(name, name).split())
    unknown = fields - set(ParallelPlan.model_fields)
    assert not unknown, f"a plan has no {', '.join(unknown)}"

    def made(problems: _Check) -> Rule:
        return Rule(problems.__name__, fields, problems, modelled, summary, outside_torch, after_others, reads_cluster)

    return made


unmodelled = partial(rule, modelled=False)
"""As ``rule``, for possible jobs that simplan does not model yet."""


def problem_of(job: Job, field: str, sentence: str, fix: str, *, value: str | None = None) -> Problem:
    """Problem of a field of a job, e.g. ``plan.pp``; ``value`` is the part of its value to show, None for all of it."""
    return Problem(
        field=field, value=_shown(attrgetter(field)(job)) if value is None else value, rule=sentence, fix=fix
    )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def undivided(job: Job, field: str, name: str, number: int, why: str = "", *, or_else: str = "") -> Iterator[Problem]:
    """Problem of a field whose value must divide a number and does not.

    Args:
        field: Field with the divisor, e.g. ``plan.tp``.
        name, number: The number and its name.
        why: End of the rule, with its punctuation.
        or_else: End of the fix, with its punctuation.
    """
    divisor = attrgetter(field)(job)
    if number % divisor:
        fix = f"use {either(nearest_divisors(number, divisor))}{or_else}"
        yield problem_of(job, field, f"must divide {name} = {number}{why}", fix)


def nearest_multiples(number: int, unit: int) -> list[int]:
    """Multiples of ``unit`` next to ``number``: the largest up to it, if any, and the smallest above it."""
    below = number // unit * unit
    return [value for value in (below, below + unit) if value]


def not_modelled(job: Job, field: str, what: str, fix: str) -> Problem:
    """Problem of a possible setting that simplan does not model yet."""
    return problem_of(job, field, f"{what} is not modeled yet", fix)


def experts_apart(plan: ParallelPlan) -> bool:
    """True when experts are sharded over other ranks than the dense layers; reads only ``ep``, ``etp`` and ``tp``."""
    return plan.ep > 1 or plan.etp < plan.tp
