"""What real ranks issued is what Level 2 of the simulated Program says: kind, group, bytes and order."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.run import run_job
from simplan import catalog
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, run_spec_of
from simplan.prediction import Prediction
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.training import Precision, TrainingSpec
from simplan.units import KIB
from simplan.validate.compare import (
    Issued,
    compare,
    issued_as_predicted,
    predicted_communications,
    ran_as_predicted,
    reduces_between_collectives,
)
from tests.executor.conftest import Run
from tests.executor.train.test_equality import assert_equal_to_one_process, run_in_float64
from tests.support.slow import slow_except

GPT = ModelSpec(family="gpt", num_hidden_layers=4, hidden_size=192, num_attention_heads=4, vocab_size=2000, seq_len=16)
LLAMA = ModelSpec(
    family="llama",
    num_hidden_layers=4,
    hidden_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=500,
    vocab_size=1500,
    seq_len=16,
)
CASES: dict[str, tuple[ModelSpec, ParallelPlan, int, Precision]] = {
    "ddp with torch's own buckets, tied": (GPT, ParallelPlan(dp_replicate=2), 4, "fp32"),
    "ddp in bf16": (LLAMA, ParallelPlan(dp_replicate=2, bucket_bytes=300 * KIB), 2, "bf16"),
    "zero-1 with torch's own buckets": (GPT, ParallelPlan(dp_shard=2, zero_stage=1), 4, "fp32"),
    "fsdp in bf16": (LLAMA, ParallelPlan(dp_shard=2), 4, "bf16"),
    "1f1b x ddp with torch's own buckets": (LLAMA, ParallelPlan(pp=2, dp_replicate=2), 4, "fp32"),
    "1f1b x fsdp in bf16": (LLAMA, ParallelPlan(pp=2, dp_shard=2), 4, "bf16"),
    "hsdp in bf16": (GPT, ParallelPlan(dp_replicate=2, dp_shard=2), 4, "bf16"),
    "tp x fsdp in bf16": (LLAMA, ParallelPlan(tp=2, dp_shard=2), 4, "bf16"),
}


def run_predicted(
    model: ModelSpec, plan: ParallelPlan, batch: int, precision: Precision, folder: Path, num_steps: int = 1
) -> tuple[Prediction, Measurement]:
    """A plan as it is predicted for GPUs, and steps of it on ranks of this machine."""
    cluster = catalog.cluster("dgx-a100-80gb", num_devices=plan.num_devices)
    training = TrainingSpec(global_batch_size=batch, precision=precision)
    prediction = predict(Job(model, cluster, training, plan, catalog.software("torch")), name="test")
    job = run_spec_of(prediction, num_steps=num_steps, num_warmup_steps=2, device="cpu", profile_memory=False)
    return prediction, run_job(job, folder)


@pytest.mark.parametrize("name", slow_except(["fsdp in bf16"], CASES))
def test_issued_as_predicted(name: str, tmp_path: Path) -> None:
    prediction, measurement = run_predicted(*CASES[name], tmp_path)
    job = measurement.job
    assert len(job.predicted_memory_bytes) == job.plan.num_devices
    assert compare(prediction.to_json(), measurement).structure_equal
    for rank, predicted in predicted_communications(job).items():
        assert issued(measurement, rank) == predicted
    assert issued_as_predicted(measurement)


def test_every_strategy_issues_what_is_predicted(finished_run: Run) -> None:
    assert_issued_as_predicted(finished_run)


def assert_issued_as_predicted(finished_run: Run) -> None:
    """These runs are in float64: as in float32 with buckets of half the bytes, but everything twice as wide.

    Except Muon's updates, which are in BF16.
    """
    job = finished_run.job
    assert ran_as_predicted(finished_run.measurement)
    is_muon = job.training.optimizer == "muon"
    half = None if job.plan.bucket_bytes is None else job.plan.bucket_bytes // 2
    narrow = job.model_copy(update={"plan": job.plan.model_copy(update={"bucket_bytes": half})})
    for rank, predicted in predicted_communications(narrow).items():
        wide = [
            (
                kind,
                ranks,
                num_bytes if is_muon and (kind, action[1:]) == ("all_gather", "OPTIM") else 2 * num_bytes,
                action,
            )
            for kind, ranks, num_bytes, action in predicted
        ]
        collectives = issued(finished_run.measurement, rank)
        for copies_last in (wide, collectives):  # hooks reduce gradients in the middle of a backward
            copies_last.sort(key=lambda issue: issue[0].endswith("host"))
        if reduces_between_collectives(job.plan):  # a bucket may be full between two exchanges of one layer
            wide.sort(key=kind_and_group)
            collectives.sort(key=kind_and_group)
        assert collectives == wide


def check_run(job: RunSpec, folder: Path) -> None:
    """Real ranks have the losses and gradients of one process, and issue what is predicted."""
    run = run_in_float64(job, folder)
    assert_equal_to_one_process(run)
    assert_issued_as_predicted(run)


def kind_and_group(message: Issued) -> tuple[str, tuple[int, ...]]:
    return message[:2]


def issued(measurement: Measurement, rank: int) -> list[Issued]:
    return [(c.kind, c.ranks, c.num_bytes, c.action) for c in measurement.ranks[rank].collectives]
