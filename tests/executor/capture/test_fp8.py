"""Linear layers of captured modules in FP8: which ones, against torchao, and the memory of ranks that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor.models.captured import build_captured
from executor.run import run_job
from simplan import catalog
from simplan.job import Job
from simplan.model.low_precision import linears
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.training import TrainingSpec
from tests.executor.capture.test_running import NUM_MICROBATCHES, PLANS, captured, job_of
from tests.executor.dry_run.accounting import account, predicted_peak
from tests.jobs import problems
from tests.support.problems import says
from tests.support.slow import slow_except

pytest.importorskip("torchao")

SIZE = 16


STAGES: dict[str, dict[str, Any]] = {
    "stages": {"pp": 2, "schedule": "1f1b"},
    "stages, zero3": {"pp": 2, "schedule": "1f1b", "dp_shard": 2},
}


def prediction_of(name: str, plan: str) -> Prediction:
    made = ParallelPlan(microbatch_size=SIZE, **(PLANS | STAGES)[plan])
    training = TrainingSpec(global_batch_size=NUM_MICROBATCHES * SIZE * made.dp, precision="fp8")
    model = ModelSpec(name=name, family="captured", captured=captured(name))
    return predict(Job(model, catalog.cluster("dgx-h100", made.num_devices), training, made, catalog.software("torch")))


@pytest.mark.slow
def test_linear_layers_of_blocks_are_in_fp8_if_kernels_take_their_sizes() -> None:
    """A state-space model has one with 12 outputs and one with 4 inputs, and products that are no linear layers."""
    model = ModelSpec(family="captured", captured=captured("StateSpaceModel"))
    assert model.captured is not None
    args = model.captured, model.layers, torch.bfloat16, torch.device("cpu"), 0
    stage = build_captured(*args, fp8_recipe="tensorwise")
    block = stage.layers["1"]
    names = {
        name for name, part in block.named_modules() if isinstance(part, nn.Linear) and type(part) is not nn.Linear
    }
    assert names == {gemm.name for gemm in linears(model.layers[1])} == {"inputs", "out"}


CASES = [("DiT", "zero3"), ("DiT", "ddp"), ("StateSpaceModel", "zero3"), *(("DiT", plan) for plan in STAGES)]


@pytest.mark.parametrize(("name", "plan"), slow_except([], CASES))
def test_the_peak_in_fp8_is_that_of_torchs_tracker(name: str, plan: str) -> None:
    job = job_of(prediction_of(name, plan))
    for rank in {0, (job.plan.pp - 1) * job.plan.dp}:
        assert predicted_peak(job, rank).total_bytes == pytest.approx(account(job, rank).total_bytes, rel=0.05)


@pytest.mark.slow
def test_losses_in_fp8_are_those_without_stages(tmp_path: Path) -> None:
    """To the last bit."""
    whole, stages = (run_job(job_of(prediction_of("SmallDiT", plan)), tmp_path / plan) for plan in ("one", "stages"))
    assert whole.losses == stages.losses


def test_a_linear_layer_of_few_rows_is_refused() -> None:
    """The condition of a diffusion transformer has one row per sample."""
    model = ModelSpec(family="captured", captured=captured("DiT"))
    [sentence] = problems(model, {"microbatch_size": 2, "dp_shard": 2}, precision="fp8")
    assert says(sentence, "plan.microbatch_size = 2: ", "2 tokens", "fp8")
