"""The Level 1 table of a plan."""

from __future__ import annotations

from simplan.program.action import Table
from simplan.program.complete import Unshard, complete_table
from simplan.program.schedules import SCHEDULES, PipelineShape
from simplan.spec.plan import ParallelPlan

__all__ = ["plan_table", "unshard_of"]


def plan_table(plan: ParallelPlan, num_microbatches: int) -> Table:
    """What every pipeline rank does in a step of the plan, complete.

    Args:
        plan: The plan, whose schedule is a known one (``simplan.spec.rules``).
        num_microbatches: Microbatches of a step.
    """
    shape = PipelineShape(plan.pp, num_microbatches, plan.virtual_stages)
    return complete_table(SCHEDULES[plan.schedule](shape), unshard=unshard_of(plan))


def unshard_of(plan: ParallelPlan) -> Unshard:
    """When FSDP gathers stages: in a pipeline by actions, without one layer by layer by itself."""
    if plan.pp == 1 or not plan.shards_parameters:
        return "none"
    return "window" if plan.zero_stage == 3 and plan.reshard_after_forward else "once"
