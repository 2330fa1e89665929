"""Action table of a plan."""

from __future__ import annotations

from functools import lru_cache

from simplan.plan.plan import ParallelPlan
from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules import SCHEDULES, PipelineShape, Schedule, StageTimes
from simplan.program.tables.complete import Unshard, complete_table
from simplan.program.tables.custom_schedule import custom_schedule, locating


def plan_table(
    plan: ParallelPlan, num_microbatches: int, times: StageTimes | None = None, kept_for_weight: float = 1.0
) -> Table:
    """Returns the complete action table of one step of a plan.

    Args:
        plan: The plan, whose schedule passed ``simplan.rules``.
        num_microbatches: Microbatches per step.
        times: Stage times, for schedules built from them; None for unit times.
        kept_for_weight: Fraction of a microbatch's activations that a stage holds from I to W, for the same schedules.

    Raises:
        SpecError: A custom schedule cannot be loaded, or is for another pipeline.
        ProgramError: The table of a custom schedule is wrong.
    """
    shape = PipelineShape(plan.pp, num_microbatches, plan.virtual_stages, times, kept_for_weight)
    if times is None and plan.schedule in SCHEDULES:
        return _known_table(plan.schedule, shape, unshard_of(plan))
    with locating(plan.schedule):
        return _made(SCHEDULES.get(plan.schedule) or custom_schedule(plan.schedule), shape, unshard_of(plan))


@lru_cache(maxsize=64)
def _known_table(name: str, shape: PipelineShape, unshard: Unshard) -> Table:
    """Returns the table of a schedule that depends on its shape alone; plans of a search share many tables."""
    return _made(SCHEDULES[name], shape, unshard)


def _made(schedule: Schedule, shape: PipelineShape, unshard: Unshard) -> Table:
    table = schedule(shape)
    if all(action.kind.is_compute for row in table for action in row):
        return complete_table(table, unshard=unshard)
    return _with_optimizer(table)


def unshard_of(plan: ParallelPlan) -> Unshard:
    """Returns how FSDP unshards stages: by actions in a pipeline, otherwise layer by layer in its hooks."""
    if plan.pp == 1 or not plan.shards_parameters:
        return "none"
    return "window" if plan.zero_stage == 3 and plan.reshard_after_forward else "once"


def _with_optimizer(table: Table) -> Table:
    """Adds OPTIM, an action of simplan that custom tables lack."""
    return tuple(
        row
        if not row or any(action.kind is ActionKind.OPTIM for action in row)
        else (*row, Action(min(action.stage for action in row), ActionKind.OPTIM))
        for row in table
    )
