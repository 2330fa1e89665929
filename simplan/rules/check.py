"""Checks a job against the rules; one error lists all violations.

There are two kinds of violation. An impossible job raises ``SpecError``, with the nearest possible values. A known
option that is not modeled yet raises ``NotModelledError``, which names the option, so that none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job
from simplan.rules.book import RULES
from simplan.rules.rule import Rule

__all__ = ["check_job", "violations"]


def violations(job: Job, rules: Sequence[Rule] = RULES) -> list[Problem]:
    """Problems of a job, in the order of the rules.

    Args:
        job: The job.
        rules: Rules to check.
    """
    return [problem for _, problem in _violated(job, rules)]


def check_job(job: Job, rules: Sequence[Rule] = RULES) -> None:
    """Raises an error for a job that violates rules.

    Args:
        job: The job.
        rules: Rules to check.

    Raises:
        NotModelledError: The only violations are options that are not modeled yet.
        SpecError: Lists every violation, including options that are not modeled.
    """
    violated = _violated(job, rules)
    if not violated:
        return
    problems = [problem for _, problem in violated]
    raise (SpecError if any(rule.modelled for rule, _ in violated) else NotModelledError)(problems)


def _violated(job: Job, rules: Sequence[Rule]) -> list[tuple[Rule, Problem]]:
    first = [(rule, problem) for rule in rules if not rule.after_others for problem in rule.problems(job)]
    return first or [(rule, problem) for rule in rules if rule.after_others for problem in rule.problems(job)]
