"""Predicted peak memory against torch's own: fake tensors followed one by one, MemTracker, and traces of real runs."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from executor.dry_run.memory_tracker import MemoryTracker
from executor.dry_run.rehearse import fake_rank
from executor.run import run_job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.program import MemoryCategory
from simplan.runs.run_spec import RunSpec
from simplan.sim.memory import memory_peak
from simplan.training import TrainingSpec
from simplan.units import MIB
from tests.executor.conftest import make_job, make_model
from tests.executor.dry_run.accounting import (
    CPU,
    account,
    fake_trainer,
    job_of,
    predicted_peak,
    predicted_program,
)
from tests.support.slow import slow_except

TOTAL, CATEGORY = 0.03, 0.06
NOTEWORTHY = 0.03  # of the peak: smaller categories are not compared


def model(family: str, **fields: Any) -> ModelSpec:
    """More than 100 million weights unless short, more than half of them in blocks."""
    sizes: dict[str, Any] = {
        "gpt": {"num_hidden_layers": 8, "intermediate_size": 4096},
        "llama": {"num_hidden_layers": 9, "num_key_value_heads": 4, "intermediate_size": 2816},
    }[family]
    common = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 16384, "seq_len": 320}
    return ModelSpec(**{"family": family, **common, **sizes, **fields})


TINY = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 2048, "seq_len": 128}
SHORT = {"num_hidden_layers": 4, "vocab_size": 8192}
"""Half the blocks, for cases that always run: fake tensors take time by their number, not by their size."""
MODELS = {
    "gpt": model("gpt"),
    "gpt-untied": model("gpt", tied_embeddings=False),
    "llama": model("llama"),
    "short-gpt": model("gpt", **SHORT),
    "short-gpt-untied": model("gpt", tied_embeddings=False, **SHORT),
    "short-llama": model("llama", **SHORT),
    "tiny-gpt": model("gpt", intermediate_size=1024, **TINY),
    "tiny-llama": model("llama", intermediate_size=704, **TINY),
}
FSDP = {"dp_shard": 4}
HSDP = {"dp_shard": 2, "dp_replicate": 2}
GATHER, ALL_TO_ALL = {"cp": 2, "cp_comm": "all_gather"}, {"cp": 2, "cp_comm": "a2a"}
PP = {"pp": 2}
OFFLOAD = {"offload_activations": True}
ON_HOST = {"offload_optimizer": True}
INTERLEAVED = {"pp": 2, "virtual_stages": 2}

# plan, microbatches, pipeline rank
STRATEGIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "one-device": ({}, 1, 0),
    "accumulation": ({}, 4, 0),
    "full": ({"recompute": "full", "microbatch_size": 8}, 1, 0),
    "selective": ({"recompute": "selective", "microbatch_size": 4}, 1, 0),
    "selective_op": ({"recompute": "selective_op", "microbatch_size": 4}, 1, 0),
    "zero3-selective_op": ({**FSDP, "recompute": "selective_op", "microbatch_size": 4}, 2, 0),
    "tp-selective_op": ({"tp": 2, "recompute": "selective_op", "microbatch_size": 4}, 2, 0),
    "ddp": ({"dp_replicate": 4}, 2, 0),
    "zero1": ({**FSDP, "zero_stage": 1}, 2, 0),
    "zero2": ({**FSDP, "zero_stage": 2}, 1, 0),
    "zero2-accumulation": ({**FSDP, "zero_stage": 2}, 3, 0),
    "zero3": (FSDP, 1, 0),
    "zero3-accumulation": (FSDP, 2, 0),
    "zero3-once-a-step": ({**FSDP, "grad_sync": "step"}, 2, 0),
    "selective_layer": ({"recompute": "selective_layer", "microbatch_size": 4}, 1, 0),
    "full-first-block": ({"recompute": "full", "recompute_layers": 1, "microbatch_size": 4}, 1, 0),
    "pp-full-first-block": ({**PP, "schedule": "1f1b", "recompute": "full", "recompute_layers": 1}, 3, 1),
    "zero3-full": ({**FSDP, "recompute": "full", "microbatch_size": 8}, 1, 0),
    "hsdp": (HSDP, 1, 0),
    "hsdp-accumulation": (HSDP, 2, 0),
    "tp": ({"tp": 2, "sequence_parallel": False}, 1, 0),
    "tp-sequence": ({"tp": 2}, 2, 0),
    "tp-zero3": ({"tp": 2, "dp_shard": 2}, 2, 0),
    "cp-gather": ({**GATHER, "microbatch_size": 4}, 2, 0),
    "cp-all-to-all": ({**ALL_TO_ALL, "microbatch_size": 4}, 2, 0),
    "cp-zero3": ({**GATHER, "dp_shard": 2, "microbatch_size": 4}, 2, 0),
    "gpipe-first": ({**PP, "schedule": "gpipe"}, 4, 0),
    "gpipe-last": ({**PP, "schedule": "gpipe"}, 4, 1),
    "1f1b-first": (PP, 4, 0),
    "1f1b-last": (PP, 4, 1),
    "1f1b-tp": ({**PP, "tp": 2}, 4, 1),
    "1f1b-ddp": ({**PP, "dp_replicate": 2}, 4, 0),
    "1f1b-zero3": ({**PP, "dp_shard": 2}, 4, 0),
    "interleaved-first": (INTERLEAVED, 4, 0),
    "interleaved-last": (INTERLEAVED, 4, 1),
    "interleaved-zero3": ({**INTERLEAVED, "dp_shard": 2}, 4, 1),
    "zb-h1-first": ({**PP, "schedule": "zb-h1"}, 4, 0),
    "zb-h1-last": ({**PP, "schedule": "zb-h1"}, 4, 1),
    "zb-h2-first": ({**PP, "schedule": "zb-h2"}, 4, 0),
    "zb-h2-last": ({**PP, "schedule": "zb-h2"}, 4, 1),
    "zb-h1-zero2-last": ({**PP, "schedule": "zb-h1", "dp_shard": 2, "zero_stage": 2}, 4, 1),
    "zb-v-first": ({**PP, "schedule": "zb-v", "virtual_stages": 2}, 4, 0),
    "zb-v-last": ({**PP, "schedule": "zb-v", "virtual_stages": 2}, 4, 1),
    "offload": ({**OFFLOAD, "microbatch_size": 4}, 2, 0),
    "offload-full": ({**OFFLOAD, "recompute": "full", "microbatch_size": 8}, 1, 0),
    "offload-selective": ({**OFFLOAD, "recompute": "selective", "microbatch_size": 4}, 1, 0),
    "offload-ddp": ({**OFFLOAD, "dp_replicate": 4, "microbatch_size": 4}, 2, 0),
    "offload-zero1": ({**OFFLOAD, **FSDP, "zero_stage": 1, "microbatch_size": 4}, 2, 0),
    "offload-zero3": ({**OFFLOAD, **FSDP, "microbatch_size": 4}, 2, 0),
    "offload-tp": ({**OFFLOAD, "tp": 2, "microbatch_size": 4}, 1, 0),
    "offload-cp-gather": ({**OFFLOAD, **GATHER, "microbatch_size": 4}, 2, 0),
    "offload-cp-all-to-all": ({**OFFLOAD, **ALL_TO_ALL, "microbatch_size": 8}, 1, 0),
    "offload-gpipe-first": ({**OFFLOAD, **PP, "schedule": "gpipe", "microbatch_size": 4}, 4, 0),
    "offload-gpipe-last": ({**OFFLOAD, **PP, "schedule": "gpipe", "microbatch_size": 4}, 4, 1),
    "offload-1f1b-first": ({**OFFLOAD, **PP, "microbatch_size": 4}, 4, 0),
    "offload-1f1b-last": ({**OFFLOAD, **PP, "microbatch_size": 4}, 4, 1),
    "offload-interleaved": ({**OFFLOAD, **INTERLEAVED, "microbatch_size": 4}, 4, 0),
    "zero3-optimizer-on-host": ({**FSDP, **ON_HOST}, 1, 0),
    "zero2-accumulation-optimizer-on-host": ({**FSDP, **ON_HOST, "zero_stage": 2}, 3, 0),
    "zero3-once-a-step-optimizer-on-host": ({**FSDP, **ON_HOST, "grad_sync": "step"}, 2, 0),
    "1f1b-zero3-optimizer-on-host": ({**PP, **ON_HOST, "dp_shard": 2}, 4, 0),
    "dualpipe-v-first": ({**PP, "schedule": "dualpipe-v", "virtual_stages": 2}, 4, 0),
}
QUICK = (
    ("ddp", "short-llama", "fp32"),
    ("zero3-accumulation", "short-gpt-untied", "bf16"),
    ("cp-gather", "short-gpt", "fp32"),
    ("zb-h1-last", "short-llama", "fp32"),
    ("zero3-once-a-step", "short-llama", "pure bf16"),
)
OTHERS = (
    ("tp-sequence", "short-gpt", "bf16"),
    ("offload-zero3", "llama", "fp32"),  # of few blocks, most would be on their way to the host
    ("zero3-optimizer-on-host", "short-gpt-untied", "bf16"),
    ("ddp", "short-llama", "pure bf16"),
)
PURE = ("one-device", "ddp", "zero3-once-a-step", "hsdp", "1f1b-zero3", "zb-h1-first", "zero3-optimizer-on-host")


TRACKED = {
    MemoryCategory.PARAMETERS: ("Parameter", "Sharded Param"),
    MemoryCategory.OPTIMIZER: ("Optstate", "OptState"),
    MemoryCategory.GATHERED: ("Unsharded Param",),
    MemoryCategory.BUFFERS: ("All Gather", "Reduce Scatter"),
}
"""What the trackers call categories; the others they divide otherwise."""


def cases() -> list[Any]:
    """Every strategy in fp32 and in mixed precision, and some with weights and states in bf16.

    Weights are tied but where pipelines hold shards of them, which is refused, and where FSDP computes in 16 bits: the
    peak may then be at the end, when autograd adds the two gradients of the tied weight, of fake tensors not in place.
    """
    strategies: list[tuple[str, str, str]] = []
    for strategy, (plan, _, _) in STRATEGIES.items():
        sharded = ParallelPlan(**plan).shards_parameters
        gpt = "gpt-untied" if sharded and "pp" in plan else "gpt"
        strategies += [(strategy, gpt, "fp32"), (strategy, "llama", "fp32")]
        strategies.append((strategy, "gpt-untied" if sharded else gpt, "bf16"))
    strategies += [(strategy, "llama", "pure bf16") for strategy in PURE]
    return slow_except(QUICK, dict.fromkeys((*QUICK, *OTHERS, *strategies)))


def job_and_rank(strategy: str, name: str, precision: str) -> tuple[RunSpec, int]:
    """A job, and the rank to look at."""
    changes, num_microbatches, pp_rank = STRATEGIES[strategy]
    dtype = precision.removeprefix("pure ")
    job = job_of(MODELS[name], changes, num_microbatches, dtype, pure_bf16=precision != dtype)
    return job, pp_rank * job.plan.num_devices // job.plan.pp


def predicted_in(job: RunSpec, rank: int, action: str) -> dict[MemoryCategory, int]:
    """The worst moment of one action, where two actions need almost as much."""
    program = predicted_program(job)
    held = Counter(dict.fromkeys(MemoryCategory, 0) | program.persistent_bytes[rank])
    worst = Counter(held)
    for op in (program.ops[index] for index in program.by_rank[rank]):
        during, after = Counter(held), Counter(held)
        for effect in op.memory:
            during[effect.category] += effect.during_bytes
            after[effect.category] += effect.after_bytes
        if str(op.action) == action and sum(during.values()) > sum(worst.values()):
            worst = during
        held = after
    return dict(worst)


@pytest.mark.parametrize(("strategy", "name", "precision"), cases())
def test_peak_is_torchs(strategy: str, name: str, precision: str) -> None:
    job, rank = job_and_rank(strategy, name, precision)
    assert job.model.num_parameters > (50e6 if name.startswith("short") else 100e6)
    memory_peak, wanted = predicted_peak(job, rank), account(job, rank)
    assert memory_peak.total_bytes == pytest.approx(wanted.total_bytes, rel=TOTAL)
    by_category = (
        memory_peak.by_category if memory_peak.action == wanted.action else predicted_in(job, rank, wanted.action)
    )
    assert sum(by_category.values()) == pytest.approx(wanted.total_bytes, rel=TOTAL)
    for category in MemoryCategory:
        pair = by_category[category], wanted.by_category.get(category, 0)
        if max(pair) > NOTEWORTHY * wanted.total_bytes:
            assert pair[0] == pytest.approx(pair[1], rel=CATEGORY), category


@pytest.mark.parametrize(
    ("strategy", "loss", "precision"),
    slow_except(
        [("gpipe-last", "chunked", "bf16")],
        [
            (strategy, *kind)
            for strategy in ("zero3-accumulation", "gpipe-last", "ddp", "1f1b-last", "cp-gather")
            for kind in (("chunked", "bf16"), ("chunked", "fp32"), ("recomputed", "fp32"))
        ],
    ),
)
def test_peak_with_loss_in_chunks_is_torchs(strategy: str, loss: str, precision: str) -> None:
    """Logits of all tokens would be a third of the peak."""
    changes, num_microbatches, pp_rank = STRATEGIES[strategy]
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    spec = model("llama", tied_embeddings=False, seq_len=512, **sizes)
    job = job_of(spec, changes, num_microbatches, precision)
    job = job.model_copy(update={"software": job.software.model_copy(update={"loss": loss})})
    rank = pp_rank * job.plan.num_devices // job.plan.pp
    measured = account(job, rank).total_bytes
    assert predicted_peak(job, rank).total_bytes == pytest.approx(measured, rel=0.01)


def with_gradients(job: RunSpec, *, views: bool, drops: bool) -> RunSpec:
    """The job with gradients as bucket views of DDP or not, and freed after the update or zeroed in place."""
    changes = {"gradient_as_bucket_view": views, "zero_grad_set_to_none": drops}
    return job.model_copy(update={"software": job.software.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("changes", "num_microbatches"),
    [
        ({}, 2),
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"grad_sync": "microbatch"}, 2, marks=pytest.mark.slow),
        pytest.param(PP, 4, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 1, "dp_shard": 4, "zero_stage": 1}, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("views", "drops"), slow_except([(True, True)], product((False, True), repeat=2)))
def test_peak_under_ddp_is_torchs(changes: dict[str, Any], num_microbatches: int, views: bool, drops: bool) -> None:
    job = job_of(MODELS["short-llama"], {"dp_replicate": 4, **changes}, num_microbatches, "fp32")
    job = with_gradients(job, views=views, drops=drops)
    assert predicted_peak(job, 0).total_bytes == pytest.approx(account(job, 0).total_bytes, rel=TOTAL / 10)


@pytest.mark.parametrize(
    ("views", "drops", "measured_mib"),
    [(False, True, 210.14), (False, False, 210.14), (True, True, 210.14), (True, False, 185.25)],
)
def test_peak_is_that_of_a_plain_script_of_torch(views: bool, drops: bool, measured_mib: float) -> None:
    """Llama of 6.5 M weights, DDP over two gloo ranks, fused AdamW and accumulation, without simplan (torch 2.13).

    torch's composite RMSNorm on CPUs, 6.5 MiB, is not in the executor's model.
    """
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    script = ModelSpec(family="llama", **sizes, intermediate_size=704, vocab_size=4096, seq_len=256)
    job = with_gradients(job_of(script, {"dp_replicate": 2}, 2, "fp32"), views=views, drops=drops)
    predicted = predicted_program(job)
    assert memory_peak(predicted, 0).total_bytes / MIB == pytest.approx(measured_mib, rel=0.036)


@pytest.mark.parametrize(
    ("strategy", "name", "precision"),
    [
        pytest.param("one-device", "short-llama", "fp32", marks=pytest.mark.slow),
        ("zero3", "short-gpt", "bf16"),
        pytest.param("full", "gpt", "bf16", marks=pytest.mark.slow),
        pytest.param("tp", "gpt-untied", "fp32", marks=pytest.mark.slow),
        pytest.param("hsdp", "llama", "fp32", marks=pytest.mark.slow),
    ],
)
def test_peak_is_that_of_torchs_mem_tracker(strategy: str, name: str, precision: str) -> None:
    """An account that is not ours; it follows one forward and backward without a pipeline."""
    job, rank = job_and_rank(strategy, name, precision)
    with fake_trainer(job, rank) as built:
        ((_, stage),) = built.stages.items()
        (optimizer,) = built.optimizers
        built.step(*built.batch(0))  # from here on there are optimizer states
        batch = built.batch(1)
        if job.plan.shards_parameters:
            tracker: MemTracker = FSDPMemTracker(stage, optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(stage, optimizer)
        with tracker:
            built.step(*batch)
    ((_, snapshot),) = tracker.get_tracker_snapshot("peak").items()
    measured = {str(getattr(key, "value", key)): num_bytes for key, num_bytes in snapshot.items()}
    memory_peak = predicted_peak(job, rank)
    assert memory_peak.total_bytes == pytest.approx(measured["Total"], rel=TOTAL)
    for category, names in TRACKED.items():
        wanted = sum(measured.get(name, 0) for name in names)
        assert memory_peak.by_category[category] == pytest.approx(wanted, rel=CATEGORY), category


@pytest.mark.parametrize(
    ("name", "changes", "num_microbatches", "precision"),
    [
        pytest.param("tiny-llama", {"dp_shard": 2}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-gpt", {"dp_shard": 2}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {"dp_shard": 2, "zero_stage": 2}, 2, "bf16", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**GATHER, "zero_stage": 3}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-gpt", {"dp_replicate": 2, "microbatch_size": 1}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-gpt", {"dp_shard": 2, "zero_stage": 1}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {"tp": 2}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {"tp": 2, "recompute": "selective_op"}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", PP, 4, "bf16", marks=pytest.mark.slow),
        pytest.param("tiny-llama", INTERLEAVED, 4, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**ALL_TO_ALL, "zero_stage": 3}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**OFFLOAD, "dp_shard": 2, "microbatch_size": 4}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**ON_HOST, "dp_shard": 2}, 2, "bf16", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**ON_HOST, "dp_shard": 2, "zero_stage": 2}, 2, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-gpt", {**ON_HOST, **HSDP}, 1, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**ON_HOST, **PP, "dp_shard": 2}, 4, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**PP, "schedule": "zb-h1"}, 4, "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {**PP, "schedule": "zb-v", "virtual_stages": 2}, 4, "fp32", marks=pytest.mark.slow),
    ],
)
def test_real_ranks_allocate_what_is_predicted(
    tmp_path: Path, name: str, changes: dict[str, Any], num_microbatches: int, precision: str
) -> None:
    """The profiler's trace of two steps on gloo.

    DDP whose gradients are bucket views is at its peak between them with microbatches of one sequence.

    The threads of gloo let a tensor go when they come to it, so gradients or weights of one more block may be alive.
    """
    job = job_of(MODELS[name], changes, num_microbatches, precision)
    job = job.model_copy(update={"num_steps": 1, "profile_memory": True})
    rebuilds = job.plan.microbatch_size == 1
    job = with_gradients(job, views=True, drops=False) if rebuilds else job
    measurement = run_job(job, tmp_path)
    block_bytes = 4 * max(layer.num_parameters for layer in job.model.layers)
    for rank in range(job.plan.num_devices):
        peak = predicted_peak(job, rank, gloo=True)
        assert (peak.action == "") == rebuilds
        measured = measurement.ranks[rank].peak_memory.allocated_bytes
        assert measured is not None
        assert peak.total_bytes * (1 - TOTAL) <= measured <= peak.total_bytes * (1 + TOTAL) + block_bytes


def test_a_sharded_stage_is_never_whole_while_it_is_built() -> None:
    """Each layer is sharded before the next is made, so that what fits sharded can be built."""
    spec = make_model("llama", num_hidden_layers=12, tied_embeddings=False)
    job = make_job(model=spec, plan={"dp_shard": 8}, training=TrainingSpec(global_batch_size=8, precision="fp32"))
    tracker = MemoryTracker(job, 0, CPU)
    with fake_rank(job, 0, tracker):
        pass
    layer_bytes = max(sum(4 * math.prod(p.shape) for p in layer.parameters) for layer in spec.layers)
    model_bytes = sum(sum(4 * math.prod(p.shape) for p in layer.parameters) for layer in spec.layers)
    assert model_bytes / 8 < tracker.storages.peak_bytes < 2 * model_bytes / 8 + 3 * layer_bytes < model_bytes
