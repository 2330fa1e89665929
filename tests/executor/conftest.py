"""Small jobs, and real runs of them that several tests look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from executor.run import run_job
from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.action import format_table
from simplan.program.tables.plan_table import plan_table
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from tests.executor import forked
from tests.hosts import unavailable
from tests.support.slow import slow_except

RANK_PROGRAMS = Path(__file__).parent / "rank_programs"
NUM_MICROBATCHES = 4
MICROBATCH_SIZE = 2


def make_model(family: str = "gpt", **fields: Any) -> ModelSpec:
    """A model of a few thousand weights."""
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


def make_job(
    schedule: str = "none", *, pp: int = 1, dp: int = 1, model: ModelSpec | None = None, **fields: Any
) -> RunSpec:
    """A job for the CPU; ``fields`` of the RunSpec, ``plan`` as a dictionary."""
    model = make_model() if model is None else model
    shape = {"pp": pp, "dp_replicate": dp, "schedule": schedule, "microbatch_size": MICROBATCH_SIZE}
    plan = ParallelPlan(**{**shape, **fields.pop("plan", {})})
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


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A run changes nothing for the processes that its caller starts later."""
    previous = _environment()
    yield
    assert _environment() == previous


def _environment() -> dict[str, str]:
    others = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")  # which pytest, and torch's compiler, set
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """For small tensors; threads of several pytest workers would wait for each other's cores."""
    torch.set_num_threads(1)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def _hosts_can_be_made() -> None:
    if reason := unavailable():
        pytest.skip(reason)


@dataclass(frozen=True)
class Run:
    """A finished run in float64 by ``dumping_worker``."""

    job: RunSpec
    measurement: Measurement
    out_dir: Path


OWN_SCHEDULE = str(Path(__file__).with_name("custom_schedule.csv"))
LLAMA: dict[str, Any] = {"family": "llama"}
LLAMA_4: dict[str, Any] = {**LLAMA, "num_hidden_layers": 4}
LLAMA_96: dict[str, Any] = {**LLAMA, "vocab_size": 96}
PP: dict[str, Any] = {"pp": 2}
DDP: dict[str, Any] = {"dp_replicate": 2, "bucket_bytes": 40_000}
FSDP: dict[str, Any] = {"dp_shard": 2}
ZERO1: dict[str, Any] = {"dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000}
ZERO2: dict[str, Any] = {"dp_shard": 2, "zero_stage": 2}
HSDP: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 2}
OFFLOAD: dict[str, Any] = {"offload_activations": True}
ON_HOST: dict[str, Any] = {"offload_optimizer": True}
SELECTIVE_OP: dict[str, Any] = {"recompute": "selective_op"}
INTERLEAVED: dict[str, Any] = {"pp": 2, "virtual_stages": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one-device-gpt-tied": ("none", {}, {}),
    "ddp2-gpt-tied": ("none", {}, DDP),
    "ddp2-every-microbatch-llama": ("none", LLAMA, {**DDP, "grad_sync": "microbatch"}),
    "zero1-2-gpt-tied": ("none", {}, ZERO1),
    "zero3-2-llama": ("none", LLAMA_96, FSDP),
    "zero3-2-gpt-tied": ("none", {}, FSDP),
    "zero2-2-once-a-step-llama": ("none", LLAMA, {**ZERO2, "grad_sync": "step"}),
    "naive-pp2-llama": ("naive", LLAMA, PP),
    "gpipe-pp2-llama-tied": ("gpipe", {**LLAMA, "tied_embeddings": True}, PP),
    "1f1b-pp2-gpt-tied": ("1f1b", {}, PP),
    "gpipe-pp2-ddp2-llama": ("gpipe", LLAMA, {**DDP, **PP}),
    "1f1b-pp2-ddp2-gpt-tied": ("1f1b", {}, {**DDP, **PP}),
    "interleaved-pp2-v2-llama": ("interleaved_1f1b", LLAMA, INTERLEAVED),
    "interleaved-pp2-v2-gpt-tied": ("interleaved_1f1b", {"num_hidden_layers": 3}, INTERLEAVED),
    "1f1b-pp2-zero3-2-llama": ("1f1b", LLAMA, {**PP, **FSDP}),
    "interleaved-pp2-v2-zero2-2-llama": (
        "interleaved_1f1b",
        {**LLAMA, "num_hidden_layers": 3},
        {**ZERO2, **INTERLEAVED},
    ),
    "interleaved-pp2-v4-zero3-2-llama": (  # more stages on a rank than torch keeps gathered
        "interleaved_1f1b",
        {**LLAMA, "num_hidden_layers": 6},
        {**PP, **FSDP, "virtual_stages": 4},
    ),
    "tp2-zero3-2-gpt-tied": ("none", {"vocab_size": 96}, {**FSDP, "tp": 2}),
    "tp2-1f1b-pp2-gpt-tied-recompute": ("1f1b", {"vocab_size": 96}, {**PP, "tp": 2, "recompute": "full"}),
    "cp2-zero3-2-llama": ("none", LLAMA, {**FSDP, "cp": 2, "cp_comm": "all_gather"}),
    "cp2-ddp2-gpt-tied": ("none", {}, {**DDP, "cp": 2, "cp_comm": "a2a"}),
    "hsdp-2x2-gpt-tied": ("none", {}, HSDP),
    "gpipe-pp2-hsdp-2x2-llama": ("gpipe", LLAMA, {**HSDP, **PP}),
    "tp2-1f1b-pp2-zero3-2-llama": ("1f1b", LLAMA_96, {**PP, **FSDP, "tp": 2}),
    "1f1b-pp2-zero1-2-gpt-tied": ("1f1b", {}, {**ZERO1, **PP}),
    "zb-h1-pp2-gpt-tied": ("zb-h1", {}, PP),
    "zb-h2-pp2-llama": ("zb-h2", LLAMA, PP),
    "zb-1p-pp2-llama-recompute": ("zb-1p", LLAMA, {**PP, "recompute": "selective"}),
    "own-table-pp2-gpt-tied": (OWN_SCHEDULE, {}, PP),
    "zb-2p-pp4-gpt-tied": ("zb-2p", {"num_hidden_layers": 4}, {"pp": 4}),
    "zb-v-pp2-gpt-tied": ("zb-v", {"num_hidden_layers": 4}, PP),
    "zb-v-pp4-llama": ("zb-v", {**LLAMA, "num_hidden_layers": 8}, {"pp": 4}),
    "dualpipe-v-pp2-llama": ("dualpipe-v", LLAMA_4, PP),
    "zb-h1-pp2-zero2-2-llama": ("zb-h1", LLAMA, {**ZERO2, **PP}),
    "tp2-zb-h1-pp2-llama": ("zb-h1", LLAMA_96, {**PP, "tp": 2}),
    "zb-v-pp2-zero3-no-reshard-2-llama": ("zb-v", LLAMA_4, {**PP, **FSDP, "reshard_after_forward": False}),
    "zb-h1-pp2-cp2-zero2-llama": ("zb-h1", LLAMA, {**PP, "cp": 2, "cp_comm": "a2a", "zero_stage": 2}),
    "hsdp-zero1-2x2-llama": ("none", LLAMA, {**ZERO1, "dp_replicate": 2}),
    "1f1b-pp2-llama-recompute-every-second-block": ("1f1b", LLAMA_4, {**PP, "recompute": "selective_layer"}),
    "1f1b-pp2-llama-recompute-first-block": ("1f1b", LLAMA_4, {**PP, "recompute": "full", "recompute_layers": 1}),
    "tp2-1f1b-pp2-gpt-tied-recompute-by-products": (
        "1f1b",
        {"vocab_size": 96},
        {**PP, "tp": 2, "sequence_parallel": False, **SELECTIVE_OP},
    ),
    "tp2-zero3-2-llama-recompute-by-products": ("none", LLAMA_96, {**FSDP, **SELECTIVE_OP, "tp": 2}),
    "zero3-2-llama-recompute-by-products": ("none", LLAMA, {**FSDP, **SELECTIVE_OP}),
    "one-device-offload-gpt-tied": ("none", {"num_hidden_layers": 4}, OFFLOAD),
    "ddp2-offload-llama-recompute": ("none", LLAMA_4, {**DDP, **OFFLOAD, "recompute": "full"}),
    "zero1-2-offload-gpt-tied": ("none", {}, {**ZERO1, **OFFLOAD}),
    "zero3-2-offload-llama": ("none", {**LLAMA, "num_hidden_layers": 3}, {**FSDP, **OFFLOAD}),
    "1f1b-pp2-offload-gpt-tied": ("1f1b", {"num_hidden_layers": 6}, {**PP, **OFFLOAD}),
    "interleaved-pp2-v2-offload-llama-recompute": (
        "interleaved_1f1b",
        {**LLAMA, "num_hidden_layers": 6},
        {**INTERLEAVED, **OFFLOAD, "recompute": "selective"},
    ),
    "zero3-2-optimizer-on-host-gpt-tied": ("none", {}, {**FSDP, **ON_HOST}),
    "zero2-2-once-a-step-optimizer-on-host-llama": ("none", LLAMA, {**ZERO2, **ON_HOST, "grad_sync": "step"}),
    "hsdp-2x2-optimizer-on-host-llama": ("none", LLAMA, {**HSDP, **ON_HOST}),
    "1f1b-pp2-zero3-2-optimizer-on-host-llama": ("1f1b", LLAMA, {**PP, **FSDP, **ON_HOST}),
    "cp2-offload-llama": ("none", LLAMA_4, {**OFFLOAD, "cp": 2, "cp_comm": "all_gather", "zero_stage": 0}),
    "cp2-zero3-offload-gpt-tied": ("none", {}, {**OFFLOAD, "cp": 2, "cp_comm": "a2a", "zero_stage": 3}),
    "tp2-offload-llama": ("none", LLAMA_96, {**OFFLOAD, "tp": 2}),
}
"""Schedule, model and plan."""


QUICK = (
    "ddp2-gpt-tied",
    "zero1-2-gpt-tied",
    "interleaved-pp2-v2-llama",
    "1f1b-pp2-zero3-2-llama",
    "zero3-2-llama-recompute-by-products",
    "zb-v-pp2-gpt-tied",
    "1f1b-pp2-offload-gpt-tied",
    "zero2-2-once-a-step-optimizer-on-host-llama",
)
"""A sample of the strategies for every run of the tests; all others are slow, four ranks most of all."""


@pytest.fixture(scope="session", params=slow_except(QUICK, CASES))
def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One real run per case, shared by all tests that look at it."""
    out_dir = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        schedule, model, plan = CASES[request.param]
        job = make_job(schedule, model=make_model(**model), plan=plan, dtype="fp64")
        measurement = run_job(job, out_dir, rank_module="dumping_worker")
    return Run(job, measurement, out_dir)
