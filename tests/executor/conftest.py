"""Small jobs, and real runs of them that several tests look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.run import run_job
from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.action import Action, format_table
from simplan.program.tables.table import plan_table
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.training.training import TrainingSpec
from tests.executor import forked
from tests.hosts import unavailable

RANK_PROGRAMS = Path(__file__).parent / "rank_programs"
NUM_MICROBATCHES = 4
MICROBATCH_SIZE = 2

MakeModel = Callable[..., ModelSpec]
MakeJob = Callable[..., RunSpec]


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


def _job(schedule: str = "none", *, pp: int = 1, dp: int = 1, model: ModelSpec | None = None, **fields: Any) -> RunSpec:
    model = _model() if model is None else model
    plan = ParallelPlan(
        **{
            "pp": pp,
            "dp_replicate": dp,
            "schedule": schedule,
            "microbatch_size": MICROBATCH_SIZE,
            **fields.pop("plan", {}),
        }
    )
    num_layers, num_stages = len(model.layers), plan.num_stages
    values: dict[str, Any] = {
        "name": "test",
        "model": model,
        "training": TrainingSpec(global_batch_size=NUM_MICROBATCHES * MICROBATCH_SIZE * plan.dp, precision="fp32"),
        "plan": plan,
        "software": catalog.software("torch"),
        "boundaries": tuple(round(stage * num_layers / num_stages) for stage in range(num_stages + 1)),
        "table": tuple(tuple(row) for row in format_table(plan_table(plan, NUM_MICROBATCHES))),
        "num_steps": 2,
        "num_warmup_steps": 1,
        "device": "cpu",
        "profile_memory": False,
        "timeout_s": 60.0,
    }
    return RunSpec(**{**values, **fields})


@pytest.fixture
def with_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The rank program whose rank 1 has a fault; takes the fault's name."""

    def program(fault: str) -> str:
        monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        monkeypatch.setenv("TEST_FAULT", fault)
        return "faulty_worker"

    return program


@pytest.fixture(scope="session", autouse=True)
def _forked_ranks() -> Iterator[None]:
    """Launches from this process fork their ranks, without torchrun."""
    with forked.forked_ranks():
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """For small tensors; threads of several pytest workers would wait for each other's cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _hosts_can_be_made() -> None:
    if reason := unavailable():
        pytest.skip(reason)


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

    job: RunSpec
    measurement: Measurement
    out_dir: Path

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The table."""
        return self.job.parsed_table()


CASES: dict[str, Callable[[], RunSpec]] = {
    "one-device-gpt-tied": lambda: _job(dtype="fp64"),
    "ddp2-gpt-tied": lambda: _job(dp=2, plan={"bucket_bytes": 40_000}, dtype="fp64"),
    "ddp2-every-microbatch-llama": lambda: _job(
        dp=2, model=_model("llama"), plan={"bucket_bytes": 40_000, "grad_sync": "microbatch"}, dtype="fp64"
    ),
    "zero1-2-gpt-tied": lambda: _job(plan={"dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000}, dtype="fp64"),
    "zero3-2-llama": lambda: _job(model=_model("llama", vocab_size=96), plan={"dp_shard": 2}, dtype="fp64"),
    "zero3-2-gpt-tied": lambda: _job(plan={"dp_shard": 2}, dtype="fp64"),
    "zero2-2-every-microbatch-llama": lambda: _job(
        model=_model("llama"), plan={"dp_shard": 2, "zero_stage": 2, "grad_sync": "microbatch"}, dtype="fp64"
    ),
    "naive-pp2-llama": lambda: _job("naive", pp=2, model=_model("llama"), dtype="fp64"),
    "gpipe-pp2-llama-tied": lambda: _job("gpipe", pp=2, model=_model("llama", tied_embeddings=True), dtype="fp64"),
    "1f1b-pp2-gpt-tied": lambda: _job("1f1b", pp=2, dtype="fp64"),
    "gpipe-pp2-ddp2-llama": lambda: _job(
        "gpipe", pp=2, dp=2, model=_model("llama"), plan={"bucket_bytes": 40_000}, dtype="fp64"
    ),
    "1f1b-pp2-ddp2-gpt-tied": lambda: _job("1f1b", pp=2, dp=2, plan={"bucket_bytes": 40_000}, dtype="fp64"),
    "interleaved-pp2-v2-llama": lambda: _job(
        "interleaved_1f1b", pp=2, model=_model("llama"), plan={"virtual_stages": 2}, dtype="fp64"
    ),
    "interleaved-pp2-v2-gpt-tied": lambda: _job(
        "interleaved_1f1b", pp=2, model=_model(num_hidden_layers=3), plan={"virtual_stages": 2}, dtype="fp64"
    ),
    "1f1b-pp2-zero3-2-llama": lambda: _job("1f1b", pp=2, model=_model("llama"), plan={"dp_shard": 2}, dtype="fp64"),
    "interleaved-pp2-v2-zero2-2-llama": lambda: _job(
        "interleaved_1f1b",
        pp=2,
        model=_model("llama", num_hidden_layers=3),
        plan={"virtual_stages": 2, "dp_shard": 2, "zero_stage": 2},
        dtype="fp64",
    ),
    "interleaved-pp2-v4-zero3-2-llama": lambda: _job(  # more stages on a rank than torch keeps gathered
        "interleaved_1f1b",
        pp=2,
        model=_model("llama", num_hidden_layers=6),
        plan={"virtual_stages": 4, "dp_shard": 2},
        dtype="fp64",
    ),
    "tp2-zero3-2-gpt-tied": lambda: _job(model=_model(vocab_size=96), plan={"tp": 2, "dp_shard": 2}, dtype="fp64"),
    "tp2-1f1b-pp2-gpt-tied-recompute": lambda: _job(
        "1f1b",
        pp=2,
        model=_model(vocab_size=96),
        plan={"tp": 2, "recompute": "full"},
        dtype="fp64",
    ),
    "cp2-zero3-2-llama": lambda: _job(
        model=_model("llama"), plan={"cp": 2, "cp_comm": "all_gather", "dp_shard": 2}, dtype="fp64"
    ),
    "cp2-ddp2-gpt-tied": lambda: _job(dp=2, plan={"cp": 2, "cp_comm": "a2a", "bucket_bytes": 40_000}, dtype="fp64"),
    "hsdp-2x2-gpt-tied": lambda: _job(plan={"dp_replicate": 2, "dp_shard": 2}, dtype="fp64"),
    "gpipe-pp2-hsdp-2x2-llama": lambda: _job(
        "gpipe", pp=2, model=_model("llama"), plan={"dp_replicate": 2, "dp_shard": 2}, dtype="fp64"
    ),
    "tp2-1f1b-pp2-zero3-2-llama": lambda: _job(
        "1f1b", pp=2, model=_model("llama", vocab_size=96), plan={"tp": 2, "dp_shard": 2}, dtype="fp64"
    ),
    "1f1b-pp2-zero1-2-gpt-tied": lambda: _job(
        "1f1b", pp=2, plan={"dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000}, dtype="fp64"
    ),
    "zb-h1-pp2-gpt-tied": lambda: _job("zb-h1", pp=2, dtype="fp64"),
    "zb-h2-pp2-llama": lambda: _job("zb-h2", pp=2, model=_model("llama"), dtype="fp64"),
    "zb-1p-pp2-llama-recompute": lambda: _job(
        "zb-1p", pp=2, model=_model("llama"), plan={"recompute": "selective"}, dtype="fp64"
    ),
    "own-table-pp2-gpt-tied": lambda: _job(str(Path(__file__).with_name("custom_schedule.csv")), pp=2, dtype="fp64"),
    "zb-2p-pp4-gpt-tied": lambda: _job("zb-2p", pp=4, model=_model(num_hidden_layers=4), dtype="fp64"),
    "zb-v-pp2-gpt-tied": lambda: _job("zb-v", pp=2, model=_model(num_hidden_layers=4), dtype="fp64"),
    "zb-v-pp4-llama": lambda: _job("zb-v", pp=4, model=_model("llama", num_hidden_layers=8), dtype="fp64"),
    "dualpipe-v-pp2-llama": lambda: _job("dualpipe-v", pp=2, model=_model("llama", num_hidden_layers=4), dtype="fp64"),
    "zb-h1-pp2-zero2-2-llama": lambda: _job(
        "zb-h1", pp=2, model=_model("llama"), plan={"dp_shard": 2, "zero_stage": 2}, dtype="fp64"
    ),
    "tp2-zb-h1-pp2-llama": lambda: _job(
        "zb-h1", pp=2, model=_model("llama", vocab_size=96), plan={"tp": 2}, dtype="fp64"
    ),
    "zb-v-pp2-zero3-no-reshard-2-llama": lambda: _job(
        "zb-v",
        pp=2,
        model=_model("llama", num_hidden_layers=4),
        plan={"dp_shard": 2, "reshard_after_forward": False},
        dtype="fp64",
    ),
    "zb-h1-pp2-cp2-zero2-llama": lambda: _job(
        "zb-h1",
        pp=2,
        model=_model("llama"),
        plan={"cp": 2, "cp_comm": "a2a", "zero_stage": 2},
        dtype="fp64",
    ),
    "hsdp-zero1-2x2-llama": lambda: _job(
        model=_model("llama"),
        plan={"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000},
        dtype="fp64",
    ),
    "1f1b-pp2-llama-recompute-every-second-block": lambda: _job(
        "1f1b",
        pp=2,
        model=_model("llama", num_hidden_layers=4),
        plan={"recompute": "selective_layer"},
        dtype="fp64",
    ),
    "1f1b-pp2-llama-recompute-first-block": lambda: _job(
        "1f1b",
        pp=2,
        model=_model("llama", num_hidden_layers=4),
        plan={"recompute": "full", "recompute_layers": 1},
        dtype="fp64",
    ),
    "tp2-1f1b-pp2-gpt-tied-recompute-by-products": lambda: _job(
        "1f1b",
        pp=2,
        model=_model(vocab_size=96),
        plan={"tp": 2, "sequence_parallel": False, "recompute": "selective_op"},
        dtype="fp64",
    ),
    "tp2-zero3-2-llama-recompute-by-products": lambda: _job(
        model=_model("llama", vocab_size=96),
        plan={"tp": 2, "dp_shard": 2, "recompute": "selective_op"},
        dtype="fp64",
    ),
    "zero3-2-llama-recompute-by-products": lambda: _job(
        model=_model("llama"), plan={"dp_shard": 2, "recompute": "selective_op"}, dtype="fp64"
    ),
    "one-device-offload-gpt-tied": lambda: _job(
        model=_model(num_hidden_layers=4), plan={"offload_activations": True}, dtype="fp64"
    ),
    "ddp2-offload-llama-recompute": lambda: _job(
        dp=2,
        model=_model("llama", num_hidden_layers=4),
        plan={"bucket_bytes": 40_000, "recompute": "full", "offload_activations": True},
        dtype="fp64",
    ),
    "zero1-2-offload-gpt-tied": lambda: _job(
        plan={
            "dp_shard": 2,
            "zero_stage": 1,
            "bucket_bytes": 40_000,
            "offload_activations": True,
        },
        dtype="fp64",
    ),
    "zero3-2-offload-llama": lambda: _job(
        model=_model("llama", num_hidden_layers=3),
        plan={"dp_shard": 2, "offload_activations": True},
        dtype="fp64",
    ),
    "1f1b-pp2-offload-gpt-tied": lambda: _job(
        "1f1b",
        pp=2,
        model=_model(num_hidden_layers=6),
        plan={"offload_activations": True},
        dtype="fp64",
    ),
    "interleaved-pp2-v2-offload-llama-recompute": lambda: _job(
        "interleaved_1f1b",
        pp=2,
        model=_model("llama", num_hidden_layers=6),
        plan={"virtual_stages": 2, "recompute": "selective", "offload_activations": True},
        dtype="fp64",
    ),
    "zero3-2-optimizer-on-host-gpt-tied": lambda: _job(plan={"dp_shard": 2, "offload_optimizer": True}, dtype="fp64"),
    "zero2-2-every-microbatch-optimizer-on-host-llama": lambda: _job(
        model=_model("llama"),
        plan={"dp_shard": 2, "zero_stage": 2, "grad_sync": "microbatch", "offload_optimizer": True},
        dtype="fp64",
    ),
    "hsdp-2x2-optimizer-on-host-llama": lambda: _job(
        model=_model("llama"), plan={"dp_replicate": 2, "dp_shard": 2, "offload_optimizer": True}, dtype="fp64"
    ),
    "1f1b-pp2-zero3-2-optimizer-on-host-llama": lambda: _job(
        "1f1b",
        pp=2,
        model=_model("llama"),
        plan={"dp_shard": 2, "offload_optimizer": True},
        dtype="fp64",
    ),
    "tp2-offload-llama": lambda: _job(
        model=_model("llama", vocab_size=96),
        plan={"tp": 2, "offload_activations": True},
        dtype="fp64",
    ),
}


QUICK = (
    "one-device-gpt-tied",
    "ddp2-gpt-tied",
    "zero1-2-gpt-tied",
    "interleaved-pp2-v2-llama",
    "1f1b-pp2-zero3-2-llama",
    "zb-h1-pp2-gpt-tied",
    "zero3-2-llama-recompute-by-products",
    "zb-v-pp2-gpt-tied",
    "zero3-2-offload-llama",
    "1f1b-pp2-offload-gpt-tied",
    "zero3-2-optimizer-on-host-gpt-tied",
    "zero2-2-every-microbatch-optimizer-on-host-llama",
)
"""A sample of the strategies for every run of the tests; all others are slow, four ranks most of all."""


def _case(name: str) -> Any:
    return pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])


@pytest.fixture(scope="session", params=[_case(name) for name in CASES])
def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One real run per case, shared by all tests that look at it."""
    out_dir = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        job = CASES[request.param]()
        measurement = run_job(job, out_dir, rank_module="dumping_worker")
    return Run(job, measurement, out_dir)
