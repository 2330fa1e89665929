"""The Level 1 table of a plan."""

from __future__ import annotations

from functools import lru_cache

from simplan.plan.plan import ParallelPlan
from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules import SCHEDULES, PipelineShape, Schedule, StageTimes
from simplan.program.tables.complete import Unshard, complete_table
from simplan.program.tables.own_schedule import own_schedule

__all__ = ["plan_table", "unshard_of"]


def plan_table(
    plan: ParallelPlan, num_microbatches: int, times: StageTimes | None = None, kept_for_weight: float = 1.0
) -> Table:
    """What every pipeline rank does in a step of the plan, complete.

    Args:
        plan: The plan, whose schedule passed ``simplan.rules``.
        num_microbatches: Microbatches of a step.
        times: Of its stages, for the schedules that are found from them.
        kept_for_weight: Part of a microbatch's activations that a stage keeps from I to W, for the same schedules.

    Raises:
        SpecError: The user's own schedule cannot be had, or is for another pipeline.
        ProgramError: Its table is wrong.
    """
    shape = PipelineShape(plan.pp, num_microbatches, plan.virtual_stages, times, kept_for_weight)
    if times is None and plan.schedule in SCHEDULES:
        return _known_table(plan.schedule, shape, unshard_of(plan))
    return _made(SCHEDULES.get(plan.schedule) or own_schedule(plan.schedule), shape, unshard_of(plan))


@lru_cache(maxsize=64)
def _known_table(name: str, shape: PipelineShape, unshard: Unshard) -> Table:
    """Of a schedule that goes by its shape alone: plans of a search have many tables in common."""
    return _made(SCHEDULES[name], shape, unshard)


def _made(schedule: Schedule, shape: PipelineShape, unshard: Unshard) -> Table:
    table = schedule(shape)
    if all(action.kind.is_compute for row in table for action in row):
        return complete_table(table, unshard=unshard)
    return _with_optimizer(table)


def unshard_of(plan: ParallelPlan) -> Unshard:
    """When FSDP gathers stages: in a pipeline by actions, without one layer by layer by itself."""
    if plan.pp == 1 or not plan.shards_parameters:
        return "none"
    return "window" if plan.zero_stage == 3 and plan.reshard_after_forward else "once"


def _with_optimizer(table: Table) -> Table:
    """OPTIM is ours: a table from elsewhere has none."""
    return tuple(
        row
        if not row or any(action.kind is ActionKind.OPTIM for action in row)
        else (*row, Action(min(action.stage for action in row), ActionKind.OPTIM))
        for row in table
    )
