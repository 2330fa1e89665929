"""Backup workers: real ranks against one process that drops the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor.models.model import build_stage
from executor.train.data import model_batch
from executor.train.loss import cross_entropy
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from tests.executor.conftest import MICROBATCH_SIZE, NUM_MICROBATCHES, Run, make_job, make_model
from tests.executor.train.reference_optimizers import reference_optimizer
from tests.executor.train.test_equality import run_in_float64

RELATIVE = 1e-9


def job_of(num_replicas: int, num_dropped: int, **fields: object) -> RunSpec:
    batch = NUM_MICROBATCHES * MICROBATCH_SIZE * num_replicas
    training = TrainingSpec(global_batch_size=batch, precision="fp32", backup_workers=num_dropped)
    return make_job(dp=num_replicas, training=training, dtype="fp64", num_steps=5, **fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three replicas, of which the last computes three times as long."""
    job = job_of(3, 1, model=make_model(num_hidden_layers=4), slowdowns=(1.0, 1.0, 3.0))
    return run_in_float64(job, tmp_path_factory.mktemp("run"))


def test_all_replicas_take_the_gradients_that_were_kept(run: Run) -> None:
    job, arrivals = run.job, run.measurement.arrivals
    print(run.measurement.arrivals)
    print(run.measurement.step_times_s, run.measurement.losses)
