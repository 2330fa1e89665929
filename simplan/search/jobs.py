"""Job of a search: checks that hold for every plan, other device counts, and usable device memory."""

from __future__ import annotations

from dataclasses import replace

from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.problems import render_value
from simplan.rules import RULES, check_job
from simplan.search.space import SearchSpace

_OF_MODULES = [rule for rule in RULES if rule.name.startswith("recompute_modules_")]


def check_without_plan(job: Job, space: SearchSpace) -> None:
    """Raise errors of a job that no plan of a space can fix.

    Args:
        job: The job; its plan is ignored.

    Raises:
        SpecError: The job is invalid for every plan; lists all problems.
        NotModelledError: The software cannot recompute a module of ``search.recompute_modules`` on its own.
    """
    plan = ParallelPlan(dp_replicate=job.cluster.num_devices)
    try:
        check_job(job.with_plan(plan))
    except SpecError as error:
        lasting = [p for p in error.problems if p.field.split(".")[0] != "plan" and "batch" not in p.field]
        if lasting:
            raise type(error)(lasting) from None
    _check_modules(job, space)


def _check_modules(job: Job, space: SearchSpace) -> None:
    """Check ``search.recompute_modules``, which does not depend on parallel degrees."""
    if space.recompute_modules and space.recompute is not None and "selective" not in space.recompute:
        value = render_value([list(modules) for modules in space.recompute_modules])
        asked = render_value(list(space.recompute))
        rule = f"lists modules for selective recomputation, and search.recompute = {asked} does not include it"
        fix = "add selective to it, or remove this"
        raise SpecError(Problem(field="search.recompute_modules", value=value, rule=rule, fix=fix))
    for modules in space.recompute_modules or ():
        try:
            check_job(job.with_plan(ParallelPlan(recompute="selective", recompute_modules=modules)), _OF_MODULES)
        except SpecError as error:
            raise type(error)([replace(each, field="search.recompute_modules") for each in error.problems]) from None


def capacity_bytes(job: Job, space: SearchSpace) -> int | None:
    """Usable device memory in bytes; None if the device memory is unknown."""
    memory_bytes = job.cluster.device.memory_bytes
    return None if memory_bytes is None else int(memory_bytes * space.max_memory_fraction)
