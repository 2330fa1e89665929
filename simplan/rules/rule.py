"""A rule: name, plan fields that the rule reads, and problems of a job that violates it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.software.software import SoftwareSpec

__all__ = ["Rule", "experts_apart", "not_modelled", "rule"]

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


def rule(
    summary: str,
    *,
    reads: str = "",
    modelled: bool = True,
    outside_torch: str = "",
    after_others: bool = False,
    reads_cluster: bool = False,
) -> Callable[[Callable[[Job], Iterator[Problem]]], Rule]:
    """Makes a rule from a function that yields the violations of a job; the rule has the function's name.

    Args:
        summary, modelled, outside_torch, after_others, reads_cluster: As in ``Rule``.
        reads: Names of fields of the plan, separated by spaces, or of properties that are made of fields.
    """
    fields = frozenset(field for name in reads.split() for field in _MADE_OF.get(name, name).split())
    assert fields <= set(ParallelPlan.model_fields), (
        f"a plan has no {', '.join(fields - set(ParallelPlan.model_fields))}"
    )

    def made(problems: Callable[[Job], Iterator[Problem]]) -> Rule:
        return Rule(problems.__name__, fields, problems, modelled, summary, outside_torch, after_others, reads_cluster)

    return made


def not_modelled(field: str, value: object, what: str, fix: str) -> Problem:
    """Problem of a possible setting that simplan does not model yet."""
    return Problem(field=field, value=str(value), rule=f"{what} is not modelled yet", fix=fix)


def experts_apart(plan: ParallelPlan) -> bool:
    """True when experts are sharded over other ranks than the dense layers; reads only ``ep``, ``etp`` and ``tp``."""
    return plan.ep > 1 or plan.etp < plan.tp
