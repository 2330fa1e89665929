"""Experts on real ranks: equal to one process, exchanging what Level 2 says, and refused where places run out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor.run import run_job
from simplan.errors import RunError
from simplan.validate.compare import issued_as_predicted
from tests.executor.conftest import SELECTIVE_OP, Run, make_job, make_model
from tests.executor.distributed.test_level2 import assert_issued_as_predicted
from tests.executor.train.test_equality import assert_equal_to_one_process, one_process, run_in_float64
from tests.support.slow import slow_except

MOE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "num_experts": 4,
    "top_k": 2,
    "moe_intermediate_size": 40,
    "capacity_factor": 2.0,  # as many places as a sequence has tokens: none is ever without
    "vocab_size": 96,
}
SHARED = {**MOE, "num_dense_layers": 1, "shared_expert_intermediate_size": 32, "shared_expert_gate": True}
UNEVEN = {**MOE, "num_experts": 6, "capacity_factor": 3.0}
DROPPING = {**MOE, "capacity_factor": 0.75, "drop_tokens": True}
MLA = {
    **SHARED,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
WIDE_QUERIES = {key: value for key, value in MLA.items() if key != "q_lora_rank"}
PIPELINE: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one rank": ("moe", SHARED, {}),
    "one rank, latent attention": ("deepseek", MLA, {}),
    "ddp": ("moe", MOE, {"dp_replicate": 2}),
    "ddp x ep": ("moe", SHARED, {"dp_replicate": 2, "ep": 2}),
    "ddp x ep, dropping": ("moe", DROPPING, {"dp_replicate": 2, "ep": 2, "bucket_bytes": 40_000}),
    "ddp x ep, recompute": ("moe", MOE, {"dp_replicate": 2, "ep": 2, "recompute": "full"}),
    "ddp x ep, recompute by products": ("moe", SHARED, {"dp_replicate": 2, "ep": 2, **SELECTIVE_OP}),
    "fsdp x ep, recompute by products": ("deepseek", MLA, {"dp_shard": 2, "ep": 2, **SELECTIVE_OP}),
    "fsdp of experts, recompute by products": ("moe", SHARED, {"dp_shard": 4, "ep": 2, **SELECTIVE_OP}),
    "fsdp of experts x tp, recompute by products": ("deepseek", MLA, {"tp": 2, "dp_shard": 2, "ep": 2, **SELECTIVE_OP}),
    "fsdp of experts x 1f1b, recompute by products": (
        "moe",
        MOE,
        {**PIPELINE, **SELECTIVE_OP, "dp_shard": 2, "tp": 2, "ep": 2},
    ),
    "fsdp, recompute by products": ("moe", SHARED, {"dp_shard": 2, **SELECTIVE_OP}),
    "fsdp": ("moe", MOE, {"dp_shard": 2}),
    "fsdp over more ranks than experts": ("moe", {**MOE, "num_experts": 3}, {"dp_shard": 4}),
    "fsdp x ep": ("moe", SHARED, {"dp_shard": 2, "ep": 2}),
    "fsdp, activations on the host": ("moe", SHARED, {"dp_shard": 2, "offload_activations": True}),
    "ddp x ep, activations on the host": (
        "moe",
        MOE,
        {"dp_replicate": 2, "ep": 2, "offload_activations": True, "recompute": "full"},
    ),
    "fsdp x ep, latent attention": ("deepseek", MLA, {"dp_shard": 2, "ep": 2}),
    "1f1b": ("moe", SHARED, PIPELINE),
    "context parallelism": ("moe", MOE, {"cp": 2, "cp_comm": "all_gather", "zero_stage": 2}),
    "ddp over ep 2 of 4": ("moe", MOE, {"dp_replicate": 4, "ep": 2, "bucket_bytes": 40_000}),
    "zero-1 x ep": ("moe", SHARED, {"dp_shard": 2, "zero_stage": 1, "ep": 2}),
    "hsdp x ep": ("moe", SHARED, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    "hsdp with experts over all": ("moe", MOE, {"dp_replicate": 2, "dp_shard": 2, "ep": 4}),
    "1f1b x ddp x ep": ("moe", MOE, {**PIPELINE, "dp_replicate": 2, "ep": 2}),
    "tp x ep over all": ("moe", SHARED, {"tp": 2, "dp_replicate": 2, "ep": 4}),
    "tp x ep": ("moe", SHARED, {"tp": 2, "ep": 2}),
    "tp x ep, recompute": ("moe", MOE, {"tp": 2, "ep": 2, "recompute": "full"}),
    "tp x ep, recompute by products": ("moe", SHARED, {"tp": 2, "ep": 2, **SELECTIVE_OP}),
    "tp that splits experts, recompute by products": (
        "moe",
        SHARED,
        {"tp": 2, "etp": 2, "dp_replicate": 2, "ep": 2, **SELECTIVE_OP},
    ),
    "tp, experts on all": ("moe", SHARED, {"tp": 2, "dp_replicate": 2}),
    "tp that splits experts": ("moe", SHARED, {"tp": 2, "etp": 2, "dp_replicate": 2, "ep": 2}),
    "tp x cp x ep": ("moe", MOE, {"tp": 2, "cp": 2, "cp_comm": "all_gather", "ep": 4}),
    "cp x ep": ("moe", MOE, {"cp": 2, "cp_comm": "a2a", "ep": 2}),
    "experts among fewer ranks": ("moe", SHARED, {"dp_shard": 4, "ep": 2}),
    "experts among fewer ranks, recompute": ("moe", MOE, {"dp_shard": 4, "ep": 2, "recompute": "full"}),
    "experts among fewer ranks, unevenly": ("moe", UNEVEN, {"dp_shard": 4, "zero_stage": 2, "ep": 2}),
    "experts among fewer ranks, split by columns": ("moe", {**MOE, "num_experts": 2}, {"dp_shard": 4, "ep": 2}),
    "experts among fewer ranks, latent attention": ("deepseek", MLA, {"dp_shard": 4, "ep": 2}),
    "experts among more ranks": ("moe", SHARED, {"dp_shard": 2, "tp": 2}),
    "experts among fewer ranks x tp": ("moe", SHARED, {"dp_shard": 2, "tp": 2, "ep": 2}),
    "experts among fewer ranks x split experts": ("moe", MOE, {"dp_shard": 4, "tp": 2, "etp": 2, "ep": 2}),
    "experts among fewer ranks x cp": ("moe", MOE, {"dp_shard": 2, "cp": 2, "cp_comm": "all_gather", "ep": 2}),
    "hsdp, experts among fewer ranks": ("moe", SHARED, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}),
    "1f1b, experts among fewer ranks": ("moe", SHARED, {**PIPELINE, "dp_shard": 4, "ep": 2}),
    "1f1b, experts among fewer ranks x tp": ("moe", MOE, {**PIPELINE, "dp_shard": 2, "tp": 2, "ep": 2}),
    "latent attention x tp": ("deepseek", MLA, {"tp": 2, "etp": 2}),
    "latent attention x tp x ep, queries from hidden states": ("deepseek", WIDE_QUERIES, {"tp": 2, "ep": 2}),
    "latent attention x tp x ep, recompute": ("deepseek", MLA, {"tp": 2, "ep": 2, "recompute": "full"}),
    "latent attention x tp x ep, recompute by products": ("deepseek", MLA, {"tp": 2, "ep": 2, **SELECTIVE_OP}),
    "latent attention x tp x fsdp": ("deepseek", MLA, {"tp": 2, "dp_shard": 2, "ep": 2}),
    "latent attention x tp x zero-1": ("deepseek", MLA, {"tp": 2, "dp_shard": 2, "zero_stage": 1, "ep": 4}),
    "latent attention x tp x 1f1b": ("deepseek", MLA, {**PIPELINE, "tp": 2, "ep": 2}),
    "fsdp x tp x ep": ("moe", SHARED, {"dp_shard": 2, "tp": 2, "ep": 4}),
    "zero-1 x tp x ep": ("moe", SHARED, {"dp_shard": 2, "tp": 2, "zero_stage": 1, "ep": 4}),
    "1f1b x tp x ep": ("moe", MOE, {**PIPELINE, "tp": 2, "ep": 2}),
    "interleaved x fsdp x ep": (
        "moe",
        {**MOE, "num_hidden_layers": 4},
        {"pp": 2, "virtual_stages": 2, "dp_shard": 2, "ep": 2, "schedule": "interleaved_1f1b"},
    ),
}
"""Family, model and plan."""
QUICK = (
    "fsdp x ep, latent attention",
    "latent attention x tp x ep, queries from hidden states",
)


@pytest.fixture(scope="module", params=slow_except(QUICK, CASES))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    family, fields, plan = CASES[request.param]
    out_dir = tmp_path_factory.mktemp(request.param.replace(" ", "-").replace(",", ""))
    plan = dict(plan)
    left_out = {"num_key_value_heads": 0} if family == "deepseek" else {}
    model = make_model(family, **fields, **left_out)
    schedule, pp = plan.pop("schedule", "none"), plan.pop("pp", 1)
    job = make_job(schedule, pp=pp, model=model, plan=plan, dtype="fp64")
    return run_in_float64(job, out_dir)


def test_losses_and_gradients_equal_one_process(run: Run) -> None:
    assert_equal_to_one_process(run)


def test_every_rank_issues_what_is_predicted(run: Run) -> None:
    """Exchanges of tokens among them."""
    assert_issued_as_predicted(run)
    plan, ranks = run.job.plan, run.measurement.ranks
    num_exchanges = sum(message.kind == "all_to_all" for rank in ranks for message in rank.collectives)
    assert (num_exchanges > 0) == (plan.ep > 1 or plan.cp_comm == "a2a")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_issues_what_is_predicted(ranks: int, tmp_path: Path) -> None:
    """What is exchanged for experts is as narrow as all activations.

    Experts of two ranks stay in fp32 beside FSDP; those of four are sharded, and gathered in 16 bits as all else.
    """
    training = make_job().training.model_copy(update={"global_batch_size": 8 * ranks, "precision": "bf16"})
    job = make_job(model=make_model("moe", **MOE), plan={"dp_shard": ranks, "ep": 2}, training=training, dtype="bf16")
    measurement = run_job(job, tmp_path)
    assert issued_as_predicted(measurement)
    losses, *_ = one_process(job, 3)
    assert measurement.losses == pytest.approx(losses, rel=2e-3)


def test_too_few_places_are_refused_with_the_number(tmp_path: Path) -> None:
    """With one place for every token that experts get on average, some expert is asked for more."""
    job = make_job(model=make_model("moe", **{**MOE, "capacity_factor": 1.0}))
    with pytest.raises(RunError, match=r"model\.capacity_factor = 1: .*capacity 12 .*expert "):
        run_job(job, tmp_path)
