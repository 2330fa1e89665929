"""Jobs that the executor rejects; plans that it runs are those of real runs in other tests."""

from __future__ import annotations

from typing import Any

import pytest

from executor.checks import check_job
from simplan.errors import NotModelledError, SpecError
from simplan.training.training import TrainingSpec


def test_stages_may_be_anywhere(make_job: Any) -> None:
    job = make_job("gpipe", pp=2)
    check_job(job.model_copy(update={"table": job.table[::-1]}))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"cp": 2}, "plan.cp_comm = ring: the executor has no ring attention; use all_gather or a2a"),
        ({"recompute": "minimal"}, "plan.recompute = minimal: the executor does not recompute like this"),
        (
            {"recompute": "selective_op", "offload_activations": True},
            "plan.recompute = selective_op: the executor does not keep single products beside activations that are "
            "moved to the host; use selective or full, or offload_activations = false",
        ),
        (
            {"pp": 2, "schedule": "1f1b", "grad_sync": "microbatch"},
            "plan.grad_sync = microbatch: gradient reduction after",
        ),
        (
            {"pp": 2, "schedule": "1f1b", "dp_shard": 2},
            "model.tied_embeddings = true: sharding of an embedding whose two copies are on different stages is not "
            "modelled yet; use model.tied_embeddings = false, or plan.zero_stage = 1",
        ),
        ({"grad_dtype": "bf16"}, "plan.grad_dtype = bf16: the executor keeps gradients in the precision"),
    ],
)
def test_plans_that_are_refused(plan: dict[str, Any], said: str, make_job: Any) -> None:
    job = make_job(plan.get("schedule", "none"), plan=plan)
    with pytest.raises(NotModelledError) as caught:
        check_job(job)
    assert said in str(caught.value)


def test_plans_that_cannot_be_are_rejected(make_job: Any) -> None:
    with pytest.raises(SpecError, match=r"plan.virtual_stages = 2"):
        check_job(make_job("interleaved_1f1b", plan={"virtual_stages": 2, "schedule": "interleaved_1f1b"}))
    with pytest.raises(SpecError, match=r"^plan.tp = 2: must divide model.vocab_size = 97"):
        check_job(make_job(plan={"tp": 2}))


def test_the_dtype_is_that_of_the_precision(make_job: Any) -> None:
    training = TrainingSpec(global_batch_size=8, precision="bf16")
    check_job(make_job(training=training, dtype="bf16"))
    with pytest.raises(SpecError, match=r"^dtype = fp32: must be bf16 for training.precision = bf16, or fp64"):
        check_job(make_job(training=training))
    halved = training.model_copy(update={"precision": "fp16"})
    with pytest.raises(NotModelledError, match=r"^training.precision = fp16: the executor does not run this precision"):
        check_job(make_job(training=halved, dtype="fp16"))
