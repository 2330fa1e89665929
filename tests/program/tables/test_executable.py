"""Tables that torch would run wrongly in silence are refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.errors import NotModelledError, ProgramError
from simplan.plan.plan import ParallelPlan
from simplan.program.action import Table, parse_table
from simplan.program.schedules import PipelineShape, gpipe, interleaved_1f1b, naive, one_f_one_b
from simplan.program.tables.complete import Unshard, complete_table
from simplan.program.tables.executable import check_executable
from simplan.program.tables.plan_table import plan_table
from simplan.software.software import SoftwareSpec, StateBytes
from tests.support.problems import says


def software(**fields: Any) -> SoftwareSpec:
    values: dict[str, Any] = {
        "id": "torch",
        "state_bytes": {"fp32": StateBytes(parameter=4, gradient=4, activation=4, boundary=4)},
        "bucket_bytes": 25 * 2**20,
        "first_bucket_bytes": 2**20,
    }
    return SoftwareSpec(**{**values, **fields})


def table(*rows: str) -> Table:
    return parse_table([row.split() for row in rows])


ONE_RANK = "0F0 0B0 0F1 0B1 0REDUCE_GRAD 0OPTIM"


@pytest.mark.parametrize(
    ("compute", "plan"),
    [
        (naive(PipelineShape(1, 4)), {}),
        (naive(PipelineShape(1, 4)), {"dp_replicate": 2}),
        (naive(PipelineShape(2, 4)), {"pp": 2}),
        (gpipe(PipelineShape(4, 8)), {"pp": 4}),
        (one_f_one_b(PipelineShape(4, 8)), {"pp": 4, "dp_replicate": 2}),
        (interleaved_1f1b(PipelineShape(2, 4, 2)), {"pp": 2, "virtual_stages": 2}),
        (naive(PipelineShape(1, 4)), {"dp_shard": 2}),
        (naive(PipelineShape(1, 4)), {"dp_shard": 2, "zero_stage": 1, "grad_sync": "microbatch"}),
        (gpipe(PipelineShape(1, 4)), {"dp_shard": 2}),
        (gpipe(PipelineShape(1, 4)), {"cp": 2, "zero_stage": 2}),
    ],
)
def test_tables_of_the_schedules_are_executable(compute: Table, plan: dict[str, Any]) -> None:
    check_executable(complete_table(compute), ParallelPlan(**plan), software())


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "dp_shard": 2, "virtual_stages": 4},
        {"pp": 2, "dp_shard": 2, "virtual_stages": 4, "zero_stage": 2},
        {"pp": 2, "dp_shard": 2, "zero_stage": 1},
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "virtual_stages": 2},
        {"pp": 2, "tp": 2, "virtual_stages": 2},
    ],
)
def test_tables_of_plans_are_executable(plan: dict[str, Any]) -> None:
    made = ParallelPlan(**plan)
    check_executable(plan_table(made, 4), made, software())


@pytest.mark.parametrize(
    ("bad", "plan", "said"),
    [
        (table("0F1 0B1 0F0 0B0 0REDUCE_GRAD 0OPTIM"), {}, "action 0F0 comes after 0F1"),
        (table("0F0 0B0 0F1 0B1 0OPTIM"), {}, "0REDUCE_GRAD is missing"),
        (table("0F0 0F1 0B1 0B0 0REDUCE_GRAD 0OPTIM"), {"dp_replicate": 2}, "must directly follow its forward"),
        (table(ONE_RANK), {"pp": 2}, "the table has 1 rows; plan.pp = 2"),
        (table(""), {}, "no forward"),
        (complete_table(table("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1")), {"pp": 2}, "the last stage must run forwards in "
         "order of microbatches"),
        (complete_table(table("0F0 0B0", "1F0 1I0 1W0")), {"pp": 2, "dp_replicate": 2},
         "1I0: ... DistributedDataParallel ... use plan.dp_shard with plan.zero_stage = 2"),
        (complete_table(table("0F0 0B0", "1F0 1I0 1W0"), unshard="window"), {"pp": 2, "dp_shard": 2},
         "1I0: ... plan.reshard_after_forward = false"),
        (complete_table(table("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")), {"pp": 2, "dp_replicate": 2, "virtual_stages": 2},
         "rank 0 has stages [0, 2]"),
        (complete_table(table("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")), {"pp": 2, "cp": 2, "virtual_stages": 2,
         "zero_stage": 1}, "rank 0 has stages [0, 2]"),
        (complete_table(gpipe(PipelineShape(1, 2))), {"dp_replicate": 2, "grad_sync": "microbatch"}, "action 0B0: "
         "every backward must directly follow its forward"),
        (complete_table(table("0F0 0B0", "1F0 1B0"), unshard="once"), {"pp": 2, "dp_replicate": 2, "zero_stage": 3},
         "action 0UNSHARD: the plan does not shard parameters"),
        (complete_table(table("0F0 0B0"), unshard="once"), {"dp_shard": 2}, "0UNSHARD: ... FSDP"),
        (complete_table(table("0F0 0B0", "1F0 1B0")), {"pp": 2, "dp_shard": 2}, "stages 0, 1 have no UNSHARD"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused(bad: Table, plan: dict[str, Any], said: str) -> None:
    with pytest.raises(ProgramError) as caught:
        check_executable(bad, ParallelPlan(**plan), software())
    assert says(str(caught.value), said)


@pytest.mark.parametrize(
    ("rows", "plan", "unshard"),
    [
        (("0F0 0B0", "1F0 1I0 1W0"), {"pp": 2, "dp_shard": 2, "reshard_after_forward": False}, "once"),
        (("0F0 0B0", "1F0 1I0 1W0"), {"pp": 2, "tp": 2}, "none"),
    ],
)
def test_a_split_backward_with_whole_parameters_is_executable(
    rows: tuple[str, ...], plan: dict[str, Any], unshard: Unshard
) -> None:
    check_executable(complete_table(table(*rows), unshard=unshard), ParallelPlan(**plan), software())


@pytest.mark.parametrize(
    ("table", "plan", "said"),
    [
        (table("0F0 0I0 0W0 0REDUCE_GRAD 0OPTIM"), {}, "0I0: a split backward needs a pipeline"),
        (
            complete_table(one_f_one_b(PipelineShape(2, 2))),
            {"pp": 2, "dp_replicate": 2, "grad_sync": "microbatch"},
            "plan.grad_sync = microbatch: torch's pipelines reduce gradients once",
        ),
    ],
)
def test_unmodelled_options_are_refused_by_name(table: Table, plan: dict[str, Any], said: str) -> None:
    with pytest.raises(NotModelledError, match=said):
        check_executable(table, ParallelPlan(**plan), software())


def test_bucket_sizes_that_torch_cannot_have_are_refused() -> None:
    with pytest.raises(NotModelledError, match=r"software.bucket_bytes = 40000000: torch uses 1 MiB"):
        check_executable(table(ONE_RANK), ParallelPlan(dp_replicate=2), software(bucket_bytes=40_000_000))
    check_executable(
        table(ONE_RANK), ParallelPlan(dp_replicate=2, bucket_bytes=50_000), software(bucket_bytes=40_000_000)
    )
    check_executable(table(ONE_RANK), ParallelPlan(dp_shard=2), software(bucket_bytes=40_000_000))
