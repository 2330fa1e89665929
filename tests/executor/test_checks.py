"""Jobs that the executor rejects; plans that it runs are those of real runs in other tests."""

from __future__ import annotations

from typing import Any

import pytest

from executor.checks import check_job
from simplan.errors import NotModelledError
from simplan.training import TrainingSpec
from tests.executor.conftest import make_job, make_model
from tests.support.problems import refuses, says


def test_stages_may_be_anywhere() -> None:
    job = make_job("gpipe", pp=2)
    check_job(job.model_copy(update={"table": job.table[::-1]}))


PP = {"pp": 2, "schedule": "1f1b"}
EXPERTS = {"family": "moe", "num_experts": 4, "top_k": 2, "moe_intermediate_size": 48}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"cp": 2}, {}, "plan.cp_comm = ring: the executor has no ring attention; use all_gather or a2a"),
    ({"recompute": "minimal"}, {}, "plan.recompute = minimal: the executor does not recompute like this"),
    (
        {"recompute": "selective_op", "offload_activations": True},
        {},
        "plan.recompute = selective_op: the executor does not support selective_op with activations that are "
        "moved to the host; use selective or full, or offload_activations = false",
    ),
    ({**PP, "grad_sync": "microbatch"}, {}, "plan.grad_sync = microbatch: gradient reduction after"),
    (
        {**PP, "dp_shard": 2},
        {},
        "model.tied_embeddings = true: sharding of an embedding whose two copies are on different stages is not "
        "modeled yet; use model.tied_embeddings = false, or plan.zero_stage = 1",
    ),
    ({"grad_dtype": "bf16"}, {}, "plan.grad_dtype = bf16: the executor keeps gradients in the precision"),
    ({}, {"precision": "mxfp8"}, "training.precision = mxfp8: the executor does not run this precision"),
    ({}, {"precision": "nvfp4"}, "training.precision = nvfp4: the executor does not run this precision"),
    (
        {},
        {"precision": "fp8", "fp8_recipe": "blockwise"},
        "training.fp8_recipe = blockwise: the executor's linear layers have no such recipe; use tensorwise, "
        "rowwise or rowwise_with_gw_hp",
    ),
    ({"tp": 2}, {"precision": "fp8"}, "plan.tp = 2: the executor does not split matrices whose scale in fp8"),
    ({}, {"optimizer": "lamb", "fused_optimizer": True}, "training.fused_optimizer = true: is of torch's optimizers"),
]
REFUSED_OF_EXPERTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"ep": 2, "dp_replicate": 2}, {"clip_grad_norm": 1.0}, "training.clip_grad_norm = 1: clipping with experts"),
    ({"tp": 2}, {"optimizer": "lamb"}, "training.optimizer = lamb: with experts that tensor-parallel"),
]


@pytest.mark.parametrize(
    ("model", "plan", "training", "said"),
    [*(({}, *case) for case in REFUSED), *((EXPERTS, *case) for case in REFUSED_OF_EXPERTS),
     ({"family": "llama", "mtp_num_layers": 1}, {"dp_replicate": 2}, {},
      "model.mtp_num_layers = 1: ... executor ... multi-token")],
)  # fmt: skip
def test_jobs_that_are_refused(
    model: dict[str, Any], plan: dict[str, Any], training: dict[str, Any], said: str
) -> None:
    asked = TrainingSpec(**{"global_batch_size": 16, "precision": "fp32", **training})
    job = make_job(plan.get("schedule", "none"), model=make_model(**model), plan=plan, training=asked)
    with pytest.raises(NotModelledError) as caught:
        check_job(job)
    assert says(str(caught.value), said)


def test_plans_that_cannot_be_are_rejected() -> None:
    with refuses("plan.virtual_stages", "2"):
        check_job(make_job("interleaved_1f1b", plan={"virtual_stages": 2, "schedule": "interleaved_1f1b"}))
    with refuses("plan.tp", "2", rule="must divide model.vocab_size = 97"):
        check_job(make_job(plan={"tp": 2}))


@pytest.mark.parametrize("boundaries", [(), (1, 2, 4), (0, 2), (0, 2, 2), (0, 3, 2, 4), (0, 4, 4)])
def test_stages_split_all_layers(boundaries: tuple[int, ...]) -> None:
    job = make_job("gpipe", pp=2)
    with refuses("boundaries", rule=f"must split {len(job.model.layers)} layers into 2 stages"):
        check_job(job.model_copy(update={"boundaries": boundaries}))


def test_the_dtype_is_that_of_the_precision() -> None:
    training = TrainingSpec(global_batch_size=8, precision="bf16")
    check_job(make_job(training=training, dtype="bf16"))
    with refuses("dtype", "fp32", rule="must be bf16 for training.precision"):
        check_job(make_job(training=training))
    halved = training.model_copy(update={"precision": "fp16"})
    with refuses("training.precision", "fp16", rule="the executor does not run this", kind=NotModelledError):
        check_job(make_job(training=halved, dtype="fp16"))


def test_checkpoints_are_not_loaded() -> None:
    """Runs begin with random weights, so that a way of loading would be ignored."""
    job = make_job("gpipe", pp=2)
    software = job.software.with_changes(loading="cpu")
    with refuses("software.loading", "cpu", rule="the executor begins with random weights", kind=NotModelledError):
        check_job(job.model_copy(update={"software": software}))
