"""Modules that a search may have run again, against what the model and its software have."""

from __future__ import annotations

from dataclasses import replace

from simplan.errors import NotModelledError, SpecError
from simplan.search.question import Question
from simplan.search.space import SearchSpace
from simplan.spec.plan import ParallelPlan
from simplan.spec.recompute_rules import recompute_rules, unmodelled_recompute

__all__ = ["check_modules"]


def check_modules(question: Question, space: SearchSpace) -> None:
    """Refuses what no plan of the space could run again: whether a module can does not depend on the ranks.

    Args:
        question: What is asked.
        space: Its plans.

    Raises:
        SpecError: A list names no module, one twice, or one that the model does not have.
        NotModelledError: The software does not run a module alone again.
    """
    model, training, software = question.model, question.training, question.software
    for modules in space.recompute_modules or ():
        plan = ParallelPlan(recompute="selective", recompute_modules=modules)
        for error, problems in (
            (SpecError, recompute_rules(model, training, plan, software)),
            (NotModelledError, unmodelled_recompute(model, plan, software)),
        ):
            found = [replace(problem, field="search.recompute_modules") for problem in problems]
            if found:
                raise error(found)
