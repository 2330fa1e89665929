"""Losses and gradients of every strategy against one process that knows nothing of plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor.distributed.mesh import ParallelDims, Peers
from executor.models.model import build_stage, own_weight
from executor.run import run_job
from executor.train.data import model_batch
from executor.train.loss import cross_entropy
from simplan import catalog
from simplan.model.implementations.loss_in_chunks import ChunkedLoss
from simplan.plan.plan import RankMapping
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from simplan.validate.compare import issued_as_predicted
from tests.executor.conftest import RANK_PROGRAMS, Run, make_job, make_model
from tests.executor.train.reference_optimizers import reference_optimizer
from tests.support.slow import slow_except

RELATIVE = 1e-9


def one_process(
    job: RunSpec, num_steps: int, kept: Sequence[Sequence[int]] = (), *, dtype: torch.dtype = torch.float64
) -> tuple[list[float], list[dict[str, torch.Tensor]], nn.Module]:
    """Mean loss and gradients of each step, and the trained model.

    A step takes one mean over all microbatches, then the update; ``kept`` has the replicas whose microbatches it uses,
    if not all.
    """
    model = build_stage(job.model, range(len(job.model.layers)), dtype, torch.device("cpu"), job.seed)
    blocks = [layer for index, layer in model.layers.items() if 0 < int(index) < len(job.model.layers) - 1]
    matrices = [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]
    optimizer = reference_optimizer(job.training, list(model.parameters()), matrices)
    num_samples = job.training.global_batch_size
    num_parts = num_samples // job.plan.microbatch_size
    losses, gradients = [], []
    for step in range(num_steps):
        inputs, targets = model_batch(job.model, seed=job.seed, step=step, first_sample=0, num_samples=num_samples)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        if kept:
            used = torch.arange(num_samples).view(job.plan.dp, -1)[list(kept[step])].flatten()
            inputs, targets, num_parts = inputs[used], targets[used], len(used) // job.plan.microbatch_size
        parts = [
            cross_entropy(model(x), y) for x, y in zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True)
        ]
        loss = torch.stack(parts).mean()
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if job.training.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.training.clip_grad_norm)
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return losses, gradients, model


def run_in_float64(job: RunSpec, folder: Path) -> Run:
    """Real ranks, which write down their gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        return Run(job, run_job(job, folder, rank_module="dumping_worker"), folder)


def own_part(job: RunSpec, rank: int, name: str, whole: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What a rank has of a gradient, where tensors are split or experts are dealt out."""
    plan, mapping = job.plan, RankMapping.of(job.plan)
    tp = Peers(plan.tp, mapping.place(rank).tp)
    dims = ParallelDims(plan.shard, tp=tp, ep=Peers(plan.ep, mapping.group("ep", rank).index(rank)))
    return own_weight(whole, name, gradient, dims)


def test_losses_and_gradients_equal_one_process(finished_run: Run) -> None:
    assert_equal_to_one_process(finished_run)


def assert_equal_to_one_process(finished_run: Run) -> None:
    """Losses and gradients of every step."""
    job = finished_run.job
    num_steps = job.num_all_steps
    losses, gradients, _ = one_process(job, num_steps)
    assert finished_run.measurement.losses == pytest.approx(losses, rel=RELATIVE)
    for step, wanted in enumerate(gradients):
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        seen = set()
        for rank in range(job.plan.num_devices):
            file = finished_run.out_dir / f"gradients.rank{rank}.step{step}.pt"
            for name, tensor in torch.load(file).items():
                # Of a tied weight on two stages, the head's copy is the embedding's tensor.
                name = name if name in wanted else "layers.0.wte.weight"
                expected = own_part(job, rank, name, wanted[name], tensor)
                # biases of keys change no softmax: their gradients are nothing but rounding
                scale = max(float(expected.abs().max()), RELATIVE * largest)
                assert float((tensor - expected).abs().max()) < RELATIVE * scale, (step, rank, name)
                seen.add(name)
        assert seen == set(wanted)


CHUNKED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "chunked-1f1b-pp2-zero3-2-llama": ("chunked", "1f1b", {"family": "llama"}, {"pp": 2, "dp_shard": 2}),
    "chunked-zb-h1-pp2-gemma2": ("chunked", "zb-h1", {"family": "gemma2", "tied_embeddings": False}, {"pp": 2}),
    "recomputed-ddp2-gpt-tied": ("recomputed", "none", {}, {"dp_replicate": 2}),
    "chunked-zero3-2-gpt-tied": ("chunked", "none", {}, {"dp_shard": 2}),
    "chunked-ddp2-cp2-llama": ("chunked", "none", {"family": "llama"}, {"dp_replicate": 2, "cp": 2, "cp_comm": "a2a"}),
    "recomputed-1f1b-pp2-zero3-2-llama": ("recomputed", "1f1b", {"family": "llama"}, {"pp": 2, "dp_shard": 2}),
}
"""Loss, schedule, model and plan."""
_OF_TEN_TOKENS = ChunkedLoss(chunk_tokens=10, recomputed=True)


@pytest.mark.parametrize("name", slow_except([*CHUNKED][:1], CHUNKED))
def test_loss_in_chunks_equals_one_process(name: str, tmp_path: Path) -> None:
    loss, schedule, model, plan = CHUNKED[name]
    torch_software = catalog.software("torch")
    losses = {**torch_software.chunked_losses, "recomputed": _OF_TEN_TOKENS}
    software = torch_software.model_copy(update={"loss": loss, "chunked_losses": losses})
    job = make_job(schedule, model=make_model(**model), plan=plan, dtype="fp64", software=software)
    assert_equal_to_one_process(run_in_float64(job, tmp_path))


MIXED = {
    "ddp": ({"dp_replicate": 2, "bucket_bytes": 40_000}, "gpt", {"all_reduce": 4}),
    "fsdp": ({"dp_shard": 2}, "llama", {"all_gather": 2, "reduce_scatter": 4}),
    "pipeline": ({"pp": 2}, "gpt", {"send": 4, "recv": 4, "all_reduce": 4}),
    "pipeline of fsdp": ({"pp": 2, "dp_shard": 2}, "llama", {"all_gather": 2, "send": 2, "reduce_scatter": 4}),
}
"""Plan, family, and bytes an element of some messages."""


@pytest.mark.parametrize("plan", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=["fsdp", "ddp"])
def test_pure_bf16_is_close_to_one_process(plan: dict[str, int], tmp_path: Path) -> None:
    """Weights, gradients and norms of 16 bits are reduced and gathered as predicted."""
    training = TrainingSpec(global_batch_size=16, precision="bf16", pure_bf16=True, clip_grad_norm=0.5)
    job = make_job(model=make_model("llama", vocab_size=96), plan=plan, training=training, dtype="bf16")
    measurement = run_job(job, tmp_path)
    losses, *_ = one_process(job, 3)
    assert measurement.losses == pytest.approx(losses, rel=1e-2)
    assert issued_as_predicted(measurement)
    reduced = "reduce_scatter" if "dp_shard" in plan else "all_reduce"
    sizes = [c.num_bytes for c in measurement.ranks[0].collectives if c.kind == reduced and c.num_bytes > 4]
    num_reductions = 4 if "dp_shard" in plan else 1  # FSDP reduces after each microbatch
    assert sum(sizes) == num_reductions * 2 * job.model.num_parameters


@pytest.mark.parametrize("name", slow_except(["fsdp"], MIXED))
def test_bf16_is_close_to_one_process(name: str, tmp_path: Path) -> None:
    """Gradients that are averaged, and what FSDP or a stage hands on, have the widths of mixed precision."""
    plan, family, widths = MIXED[name]
    model = make_model(family, vocab_size=96)
    batch = 8 * plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    training = TrainingSpec(global_batch_size=batch, precision="bf16")
    schedule = "1f1b" if "pp" in plan else "none"
    job = make_job(schedule, model=model, plan=plan, training=training, dtype="bf16")
    measurement = run_job(job, tmp_path)
    losses, *_ = one_process(job, 3)
    assert measurement.losses == pytest.approx(losses, rel=2e-3)
    assert measurement.losses != pytest.approx(losses, rel=1e-7)
    assignment = job.assignment
    for rank in measurement.ranks:
        stage = RankMapping.of(job.plan).place(rank.rank).pp
        stage_elements = sum(model.layers[i].num_parameters for i in assignment.layer_range(stage))
        if model.tied_embeddings and job.plan.pp == 1:
            stage_elements -= model.vocab_size * model.hidden_size
        for kind, width in widths.items():
            sizes = [c.num_bytes for c in rank.collectives if c.kind == kind]
            hidden = job.plan.microbatch_size * model.seq_len * model.hidden_size
            if kind in ("send", "recv"):
                assert set(sizes) == {width * hidden}
            elif kind == "all_reduce" and job.plan.pp > 1:
                assert sizes == [width * model.vocab_size * model.hidden_size]
            elif kind != "all_gather" or job.plan.pp > 1:
                in_halves = job.plan.shards_parameters and job.plan.pp == 1 and kind == "reduce_scatter"
                times = job.training.global_batch_size // (job.plan.dp * job.plan.microbatch_size) if in_halves else 1
                assert sum(sizes) == times * width * stage_elements
            else:
                assert max(sizes) == width * max(layer.num_parameters for layer in model.layers)
