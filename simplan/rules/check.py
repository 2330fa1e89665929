"""Whether the parts of a job go together; every violation is told at once.

Two kinds of violation: a job that cannot be (``SpecError``), with the nearest values that can, and an option that is
known but not modelled yet (``NotModelledError``), refused by name so that it is never silently ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job
from simplan.rules.book import RULES
from simplan.rules.rule import Rule

__all__ = ["check_job", "violations"]


def violations(job: Job, rules: Sequence[Rule] = RULES) -> list[Problem]:
    """What a job violates, in the order of the rules.

    Args:
        job: The job.
        rules: Which are asked.
    """
    return [problem for _, problem in _violated(job, rules)]


def check_job(job: Job, rules: Sequence[Rule] = RULES) -> None:
    """Refuses a job that violates rules.

    Args:
        job: The job.
        rules: Which are asked.

    Raises:
        NotModelledError: All that is wrong is that the job uses options that are not modelled yet.
        SpecError: With every violation, options that are not modelled included.
    """
    violated = _violated(job, rules)
    if not violated:
        return
    problems = [problem for _, problem in violated]
    raise (SpecError if any(rule.modelled for rule, _ in violated) else NotModelledError)(problems)


def _violated(job: Job, rules: Sequence[Rule]) -> list[tuple[Rule, Problem]]:
    first = [(rule, problem) for rule in rules if not rule.after_others for problem in rule.problems(job)]
    return first or [(rule, problem) for rule in rules if rule.after_others for problem in rule.problems(job)]
