"""Optimizers of torchao, bitsandbytes and transformers on real ranks, against those packages in one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.run import run_job
from simplan.optimizers import OPTIMIZERS, OptimizerName
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from tests.executor.conftest import make_job, make_model
from tests.executor.distributed.test_level2 import assert_issued_as_predicted
from tests.executor.train.test_equality import one_process, run_in_float64
from tests.support.slow import slow_except

SIZES: dict[str, Any] = {"family": "llama", "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 1}


def job_of(plan: dict[str, Any], optimizer: str, dtype: str = "fp64") -> RunSpec:
    """With shards of 4,096 weights and more, in whole blocks of 256."""
    training = TrainingSpec(global_batch_size=16, precision="fp32", optimizer=optimizer)  # type: ignore[arg-type]
    return make_job("none", model=make_model(**SIZES), plan=plan, training=training, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_torchao_under_fsdp2_equals_one_process(optimizer: str, tmp_path: Path) -> None:
    """Blocks are inside of shards, so that their scales are those of whole tensors. Ranks alone compile."""
    job = job_of({"dp_shard": 2}, optimizer)
    run = run_in_float64(job, tmp_path)
    losses, _, _ = one_process(job, job.num_all_steps)
    assert run.measurement.losses == pytest.approx(losses, rel=1e-6)  # the step is in FP32
    assert_issued_as_predicted(run)


OTHERS: list[tuple[OptimizerName, str]] = [
    (optimizer, plan) for optimizer in ("adamw_8bit", "lion", "lion_8bit", "adafactor") for plan in ("ddp", "zero-1")
]
PLANS: dict[str, dict[str, Any]] = {"ddp": {"dp_replicate": 2}, "zero-1": {"dp_shard": 2, "zero_stage": 1}}


@pytest.mark.parametrize(("optimizer", "plan"), slow_except([("adamw_8bit", "ddp"), ("adafactor", "ddp")], OTHERS))
def test_others_equal_one_process(optimizer: OptimizerName, plan: str, tmp_path: Path) -> None:
    """In FP32, in which ranks add gradients in another order than one process."""
    if find_spec(OPTIMIZERS[optimizer].package) is None:
        pytest.skip(f"without {OPTIMIZERS[optimizer].package}")
    job = job_of(PLANS[plan], optimizer, dtype="fp32")
    measured = run_job(job, tmp_path)
    losses, _, _ = one_process(job, job.num_all_steps, dtype=torch.float32)
    assert measured.losses == pytest.approx(losses, rel=1e-4)
