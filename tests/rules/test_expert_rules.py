"""Ways to bring tokens to experts that do not go with a plan."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.errors import SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.rules import check_job, violations
from simplan.rules.experts import expert_overlap_precision, expert_overlap_ranks, expert_overlap_stages
from simplan.training.training import TrainingSpec
from tests.model.test_moe import model_of


@pytest.mark.parametrize(
    ("plan", "software", "said"),
    [
        ({"pp": 2}, {"expert_overlap": True}, r"plan.virtual_stages = 1: must be more with .*; use 2 or more, or"),
        ({"pp": 2, "schedule": "gpipe"}, {"expert_overlap": True}, r"plan.virtual_stages = 1: must be more with"),
        ({"tp": 2, "etp": 2}, {"expert_dispatch": "deepep"}, "software.expert_dispatch = deepep: .*plan.etp = 1"),
    ],
)
def test_ways_to_bring_tokens_that_do_not_go_with_a_plan(
    plan: dict[str, Any], software: dict[str, Any], said: str
) -> None:
    made = ParallelPlan(ep=2, dp_replicate=2, **plan)
    parts = model_of(), catalog.cluster("dgx-h100", made.num_devices), TrainingSpec(global_batch_size=8), made
    profile = catalog.software("megatron-bridge")
    check_job(Job(*parts, profile))
    with pytest.raises(SpecError, match=said):
        check_job(Job(*parts, profile.model_copy(update=software)))


def test_exchanges_beside_another_microbatch_are_for_narrow_weights_and_several_stages() -> None:
    """What Megatron Core asserts of overlap_moe_expert_parallel_comm."""
    profile = catalog.software("megatron-core").model_copy(update={"expert_overlap": True})
    cluster = catalog.cluster("dgx-h100", 4)

    def fields(plan: ParallelPlan, precision: Any = "bf16") -> list[str]:
        training = TrainingSpec(global_batch_size=8, precision=precision)
        job = Job(model_of(), cluster, training, plan, profile)
        return [
            p.field for p in violations(job, (expert_overlap_ranks, expert_overlap_stages, expert_overlap_precision))
        ]

    assert fields(ParallelPlan(ep=2, dp_replicate=4)) == []
    assert fields(ParallelPlan(ep=2, dp_replicate=2, pp=2, virtual_stages=2)) == []
    assert fields(ParallelPlan(ep=2, dp_replicate=2, pp=2), "fp32") == ["plan.virtual_stages", "training.precision"]
    assert fields(ParallelPlan(ep=1, dp_replicate=2, pp=2)) == ["plan.ep"]
    several = ParallelPlan(ep=2, dp_replicate=2, pp=2, virtual_stages=2)
    check_job(Job(model_of(), cluster, TrainingSpec(global_batch_size=8), several, profile))
