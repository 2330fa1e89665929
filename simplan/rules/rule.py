"""What a rule is: a name, the fields of a plan that it reads, and what it says to a job that violates it."""

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
"""Properties of a plan that may be named among what a rule reads, and the fields that each is made of."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a job.

    Attributes:
        name: Stable, and the key in the table of what a search rejected.
        reads: Fields of the plan that it looks at; empty for a rule about everything else of a job.
        problems: What is violated, ready to be told; nothing where the rule holds. Takes any plan, however wrong in
            other ways.
        modelled: Whether a job that violates it could not be. Else it could, and simplan does not model it.
        summary: The rule in one sentence without numbers.
        outside_torch: The same for software that does not run on torch, where torch's own limits say nothing; empty for
            the same sentence.
        after_others: It is asked only of jobs that violate no other rule.
        reads_cluster: It looks at the cluster, of which the executor's ranks know nothing.
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
        """The rule in one sentence, to someone who uses a software."""
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
    """Makes a rule of a function that says what of a job violates it; the name is the function's.

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
    """The problem of something that could be, and that simplan does not model yet."""
    return Problem(field=field, value=str(value), rule=f"{what} is not modelled yet", fix=fix)


def experts_apart(plan: ParallelPlan) -> bool:
    """As of ``Shard``, read from the fields that it depends on alone."""
    return plan.ep > 1 or plan.etp < plan.tp
