"""Small jobs, and real runs of them that several tests look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor.run import run_job
from simplan.program.action import Action, format_table
from simplan.program.complete import complete_table
from simplan.program.job import Job
from simplan.program.measurement import Measurement
from simplan.program.schedules import SCHEDULES
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec, StateBytes
from simplan.spec.training import TrainingSpec

RANK_PROGRAMS = Path(__file__).parent / "rank_programs"
NUM_MICROBATCHES = 4
MICROBATCH_SIZE = 2

MakeModel = Callable[..., ModelSpec]
MakeJob = Callable[..., Job]


def _model(family: str = "gpt", **fields: Any) -> ModelSpec:
    sizes: dict[str, Any] = {
        "family": family,
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if family == "gpt" else 2,
        "intermediate_size": 80,
        "vocab_size": 97,
        "seq_len": 24,
    }
    return ModelSpec(**{**sizes, **fields})


def _job(schedule: str = "none", *, pp: int = 1, dp: int = 1, model: ModelSpec | None = None, **fields: Any) -> Job:
    model = _model() if model is None else model
    plan: dict[str, Any] = {"pp": pp, "dp_replicate": dp, "schedule": schedule, "microbatch_size": MICROBATCH_SIZE}
    table = complete_table(SCHEDULES[schedule](pp, NUM_MICROBATCHES))
    num_layers = len(model.layers)
    values: dict[str, Any] = {
        "name": "test",
        "model": model,
        "training": TrainingSpec(global_batch_size=NUM_MICROBATCHES * MICROBATCH_SIZE * dp, precision="fp32"),
        "plan": ParallelPlan(**{**plan, **fields.pop("plan", {})}),
        "software": SoftwareSpec(
            id="torch",
            state_bytes={"fp32": StateBytes(parameter=4, gradient=4, activation=4, boundary=4)},
            bucket_bytes=25 * 2**20,
            first_bucket_bytes=2**20,
        ),
        "boundaries": tuple(round(stage * num_layers / pp) for stage in range(pp + 1)),
        "table": tuple(tuple(row) for row in format_table(table)),
        "num_steps": 2,
        "num_warmup_steps": 1,
        "device": "cpu",
        "profile_memory": False,
        "timeout_s": 60.0,
    }
    return Job(**{**values, **fields})


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """A model of a few thousand weights: family and fields to change."""
    return _model


@pytest.fixture(scope="session")
def make_job() -> MakeJob:
    """A job for the CPU: schedule, pp, dp, model and fields to change."""
    return _job


@dataclass(frozen=True)
class Run:
    """A finished run in float64 by ``dumping_worker``."""

    job: Job
    measurement: Measurement
    out_dir: Path

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The table."""
        return self.job.parsed_table()


CASES: dict[str, Callable[[], Job]] = {
    "one-device-gpt-tied": lambda: _job(dtype="fp64"),
    "ddp2-gpt-tied": lambda: _job(dp=2, plan={"bucket_bytes": 40_000}, dtype="fp64"),
    "naive-pp2-llama": lambda: _job("naive", pp=2, model=_model("llama"), dtype="fp64"),
    "gpipe-pp2-llama-tied": lambda: _job("gpipe", pp=2, model=_model("llama", tied_embeddings=True), dtype="fp64"),
    "1f1b-pp2-gpt-tied": lambda: _job("1f1b", pp=2, dtype="fp64"),
    "gpipe-pp2-ddp2-llama": lambda: _job(
        "gpipe", pp=2, dp=2, model=_model("llama"), plan={"bucket_bytes": 40_000}, dtype="fp64"
    ),
    "1f1b-pp2-ddp2-gpt-tied": lambda: _job("1f1b", pp=2, dp=2, plan={"bucket_bytes": 40_000}, dtype="fp64"),
}


@pytest.fixture(scope="session", params=list(CASES))
def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One real run per case, shared by all tests that look at it."""
    out_dir = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        job = CASES[request.param]()
        measurement = run_job(job, out_dir, rank_module="dumping_worker")
    return Run(job, measurement, out_dir)
