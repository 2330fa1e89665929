"""The table of a plan: its schedule, and FSDP's gathers where the plan's pipeline has them."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.plan.plan import ParallelPlan
from simplan.program.action import ActionKind
from simplan.program.schedules import PipelineShape, gpipe, interleaved_1f1b, naive
from simplan.program.tables.check import check_table
from simplan.program.tables.complete import complete_table
from simplan.program.tables.table import plan_table, unshard_of


@pytest.mark.parametrize(
    ("plan", "unshard"),
    [
        ({"dp_shard": 4}, "none"),
        ({"pp": 2}, "none"),
        ({"pp": 2, "dp_replicate": 2}, "none"),
        ({"pp": 2, "dp_replicate": 2, "zero_stage": 3}, "none"),
        ({"pp": 2, "dp_shard": 2, "zero_stage": 1}, "none"),
        ({"pp": 2, "dp_shard": 2, "zero_stage": 2}, "once"),
        ({"pp": 2, "dp_shard": 2, "reshard_after_forward": False}, "once"),
        ({"pp": 2, "dp_shard": 2}, "window"),
        ({"pp": 2, "cp": 2, "zero_stage": 3}, "window"),
    ],
)
def test_which_plans_gather_by_actions(plan: dict[str, Any], unshard: str) -> None:
    made = ParallelPlan(**plan)
    assert unshard_of(made) == unshard
    table = plan_table(made, 4)
    check_table(table, made.num_stages, 4)
    kinds = {action.kind for row in table for action in row}
    assert (ActionKind.UNSHARD in kinds) == (ActionKind.RESHARD in kinds) == (unshard != "none")


def test_the_schedule_is_the_plans() -> None:
    assert plan_table(ParallelPlan(), 3) == complete_table(naive(PipelineShape(1, 3)))
    assert plan_table(ParallelPlan(pp=2, schedule="gpipe"), 3) == complete_table(gpipe(PipelineShape(2, 3)))
    interleaved = complete_table(interleaved_1f1b(PipelineShape(2, 3, 4)))
    assert plan_table(ParallelPlan(pp=2, virtual_stages=4), 3) == interleaved
