"""Runs two ranks that split the layers of small models, for the tests of tensor and context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from executor.distributed.mesh import ParallelDims, Peers
from executor.models.model import build_stage, own_weight
from executor.train.data import model_batch
from executor.train.loss import cross_entropy
from simplan.model.layer import CollectiveKind, LayerCollective, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import Recompute
from simplan.plan.shard import Shard
from tests.executor.forked import run_program
from tests.executor.rank_programs.exchanging_ranks import NUM_RANKS, NUM_SAMPLES, SEED

ROOT = Path(__file__).resolve().parents[3]
Issued = tuple[str, tuple[int, ...], int]


class Case(NamedTuple):
    """What two ranks run."""

    model: ModelSpec
    shard: Shard
    recompute: Recompute
    dtype: torch.dtype


def small_model(family: str) -> ModelSpec:
    """Sizes that two ranks can split in every way, tokens in four parts."""
    return ModelSpec(
        family=family,
        num_hidden_layers=2,
        hidden_size=48,
        num_attention_heads=8,
        num_key_value_heads=8 if family == "gpt" else 4,
        intermediate_size=80,
        vocab_size=98,
        seq_len=24,
    )


def run_cases(cases: list[Case], folder: Path) -> list[list[Any]]:
    """Results of every case by rank (see the rank program)."""
    torch.save([tuple(case) for case in cases], folder / "cases.pt")
    run_program("exchanging_ranks", NUM_RANKS, folder)
    by_rank = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def assert_equals_one_process(case: Case, results: list[Any]) -> None:
    """Loss and gradients to 1e-9, each rank's part of them."""
    stage = build_stage(case.model, range(len(case.model.layers)), case.dtype, torch.device("cpu"), SEED)
    inputs, targets = model_batch(case.model, seed=SEED, step=0, first_sample=0, num_samples=NUM_SAMPLES)
    inputs = inputs.to(case.dtype) if inputs.is_floating_point() else inputs
    loss = cross_entropy(stage(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    mean = sum(result["loss"] for result in results) / len(results)  # of equally many tokens
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-9, atol=0)
    largest = max(float(p.grad.abs().max()) for p in stage.parameters() if p.grad is not None)
    for rank, result in enumerate(results):
        dims = ParallelDims(case.shard, Peers(case.shard.tp, rank if case.shard.tp > 1 else 0))
        for name, parameter in stage.named_parameters():
            gradient = result["gradients"][name]
            assert parameter.grad is not None
            wanted = own_weight(parameter.grad, name, gradient, dims)
            # biases of keys change no softmax: their gradients are nothing but rounding
            scale = max(float(wanted.abs().max()), 1e-9 * largest)
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9 * scale, msg=name)


def wanted_exchanges(case: Case) -> list[Issued]:
    """What the layers say is exchanged in one forward and backward, in order."""
    layers, width = case.model.layers_of(case.shard), case.dtype.itemsize
    issued: list[Issued] = []
    for layer in layers:
        issued += _messages(layer, range(len(layer.kernels)), width, backward=False)
    for layer in reversed(layers):
        end = len(layer.kernels)
        for rerun in recomputation(layer, case.recompute).reruns:
            issued += _messages(layer, range(end - 1, rerun.needed_by, -1), width, backward=True)
            issued += _messages(layer, rerun.kernels, width, backward=False)
            end = rerun.needed_by + 1
        issued += _messages(layer, range(end - 1, -1, -1), width, backward=True)
    return issued


def _messages(layer: LayerSpec, indices: range | tuple[int, ...], width: int, *, backward: bool) -> Iterator[Issued]:
    for index in indices:
        kernel = layer.kernels[index]
        if isinstance(kernel, LayerCollective):
            kind: CollectiveKind | None = kernel.backward if backward else kernel.forward
            if kind is not None:
                # statistics that stay in fp32 beside narrower activations are as wide as wider ones
                num_bytes = NUM_SAMPLES * kernel.elements * max(kernel.bytes_per_element or width, width)
                yield str(kind), tuple(range(NUM_RANKS)), num_bytes


def wanted_order(case: Case) -> list[str]:
    """The order in which the layers say that gradients complete."""
    order = []
    for index, layer in reversed(list(enumerate(case.model.layers_of(case.shard)))):
        names = [layer.parameters[i].name for i in layer.gradient_order]
        order += [f"layers.{index}.{name}" for name in names if name not in layer.tied]
    return order
