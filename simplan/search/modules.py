"""Modules that a search may have run again, against what the model and its software have."""

from __future__ import annotations

from dataclasses import replace

from simplan.errors import NotModelledError, Problem, SpecError
from simplan.problems import render_value
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
        SpecError: A list names no module, one twice, or one that the model does not have; or no plan of the space has
            selective recomputation.
        NotModelledError: The software does not run a module alone again.
    """
    model, training, software = question.model, question.training, question.software
    if space.recompute_modules and space.recompute is not None and "selective" not in space.recompute:
        value = render_value([list(modules) for modules in space.recompute_modules])
        asked = render_value(list(space.recompute))
        rule = f"says what selective recomputation may run again, and search.recompute = {asked} has none"
        fix = "add selective to it, or remove this"
        raise SpecError(Problem(field="search.recompute_modules", value=value, rule=rule, fix=fix))
    for modules in space.recompute_modules or ():
        plan = ParallelPlan(recompute="selective", recompute_modules=modules)
        for error, problems in (
            (SpecError, recompute_rules(model, training, plan, software)),
            (NotModelledError, unmodelled_recompute(model, plan, software)),
        ):
            found = [replace(problem, field="search.recompute_modules") for problem in problems]
            if found:
                raise error(found)
