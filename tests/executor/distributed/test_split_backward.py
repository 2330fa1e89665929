"""torch's split backward: what it holds between its two parts and at most in each, by its own trace of allocations,
and the facts that decide what is refused with it."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile

from executor.distributed.ddp import wrap_ddp
from executor.distributed.mesh import ParallelDims, Peers
from executor.models.model import build_stage
from executor.train.loss import cross_entropy, split_loss
from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import Recompute
from simplan.plan.shard import Shard
from simplan.program.memory.footprint import layer_footprint
from simplan.program.memory.split_footprint import split_effects, split_footprint
from simplan.program.program import MemoryEffect, Phase, gc_paused
from tests.executor.models.layer_runs import CPU, SCALARS, SHARDS, STATES, traced
from tests.executor.rank_programs.exchanging_ranks import Listener
from tests.support.slow import slow_except

WHOLE = Shard()
BLOCK, BLOCKS, HEAD, LAST = (1,), (1, 2), (3,), (2, 3)  # indices of a stage's layers


def model_of(family: str, **fields: int) -> ModelSpec:
    return ModelSpec(
        **{
            "family": family,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4 if family == "llama" else 8,
            "intermediate_size": 256,
            "vocab_size": 500,
            "seq_len": 64,
            **fields,
        }
    )


class Held(NamedTuple):
    """Bytes of a stage beside its input, its output and the gradients of both.

    Attributes:
        forward: Kept by forward.
        between: Held from I to W.
        input_peak, weight_peak: At most in I, with the gradient of the input, and in W.
        end: Left by W.
    """

    forward: int
    between: int
    input_peak: int
    weight_peak: int
    end: int


class StageRun:
    """A stage in the middle of a pipeline or at its end, run forward and backward in two parts."""

    def __init__(
        self,
        model: ModelSpec,
        indices: tuple[int, ...],
        precision: str,
        *,
        batch: int = 3,
        shard: Shard = WHOLE,
        recompute: Recompute = "none",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._precision = precision
        self._parallel = ParallelDims.silent(shard)
        layers = model.layers_of(shard)
        self.layers = [layers[index] for index in indices]
        self.has_loss = self.layers[-1].kind is LayerKind.HEAD
        dtype = dtype or (torch.bfloat16 if precision == "cast" else torch.float32)
        self.stage = build_stage(model, indices, dtype, CPU, 0, self._parallel, recompute)
        generator = torch.Generator().manual_seed(1)
        (shape,) = layers[indices[0] - 1].output_shapes
        self.input = torch.randn(batch, *shape, generator=generator).to(dtype).requires_grad_()
        self._targets = torch.randint(model.vocab_size, (batch, model.seq_len // shard.cp), generator=generator)
        self._gradient = torch.randn(batch, *shape, generator=generator).to(dtype)
        for parameter in self.stage.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self) -> Tensor:
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with autocast if self._precision == "autocast" else nullcontext():
            out: Tensor = self.stage(self.input)
        if not self.has_loss:
            return out
        with split_loss(self._parallel):
            return cross_entropy(out, self._targets, self._parallel)

    def backward(self, out: Tensor) -> None:
        with split_loss(self._parallel):
            torch.autograd.backward(out, None if self.has_loss else self._gradient)

    def first_part(self, out: Tensor) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
        gradients = None if self.has_loss else [self._gradient]
        with split_loss(self._parallel):
            return stage_backward_input([out], gradients, [self.input], self.stage.parameters())

    def second_part(self, left: list[dict[str, Any]]) -> None:
        stage_backward_weight(self.stage.parameters(), left)

    def held(self) -> Held:
        """After a first run, in which torch makes what it makes once."""
        self.second_part(self.first_part(self.forward())[1])
        self.input.grad = None
        with gc_paused():  # nor between the traces
            return self._traced()

    def _traced(self) -> Held:
        out, kept, _ = traced(self.forward)
        result = 0 if self.has_loss else out.nbytes
        ((gradient,), left), added, input_peak = traced(lambda: self.first_part(out))
        _, freed, weight_peak = traced(lambda: self.second_part(left))
        forward = kept - result
        between = forward + added - gradient.nbytes
        return Held(forward, between, forward + input_peak, between + weight_peak, between + freed)


def predicted(run: StageRun, precision: str, batch: int, recompute: Recompute = "none") -> Held:
    """The same from the layers. Receive buffers, which have the stage's input, are counted elsewhere."""
    state = STATES[precision]
    footprints = [layer_footprint(layer, batch, state, recomputation(layer, recompute)) for layer in run.layers]
    first = footprints[0]
    footprints[0] = first._replace(activations=first.activations - first.input_bytes)
    last = len(run.layers) - 1
    parts = [
        split_footprint(layer, batch, state, footprint, receives=index == last)
        for index, (layer, footprint) in enumerate(zip(run.layers, footprints, strict=True))
    ]
    forward = sum(footprint.activations + footprint.logits for footprint in footprints)
    during_input, after_input = totals(split_effects(parts[::-1], Phase.BACKWARD_INPUT))
    during_weight, after_weight = totals(split_effects(parts, Phase.BACKWARD_WEIGHT))
    between = forward + after_input
    return Held(forward, between, forward + during_input, between + during_weight, between + after_weight)


def totals(effects: tuple[MemoryEffect, ...]) -> tuple[int, int]:
    """Bytes during and after."""
    return sum(effect.during_bytes for effect in effects), sum(effect.after_bytes for effect in effects)


def half_of_the_statistics(run: StageRun, batch: int) -> int:
    """LayerNorm's of 16-bit input are fp32 on CUDA only."""
    kept = [tensor for layer in run.layers for tensor in layer.saved if tensor.name.endswith("statistics")]
    return batch * sum(2 * tensor.elements for tensor in kept)


CASES = [
    *itertools.product(("gpt", "llama"), ("whole", "tensor", "all_gather", "a2a"), (BLOCK, BLOCKS, HEAD, LAST)),
    *itertools.product(
        ("bert",), ("whole",), (BLOCKS, LAST)
    ),  # begins its blocks with matrices, and ends them in norms
]


@pytest.mark.parametrize("precision", slow_except(["autocast"], STATES))
@pytest.mark.parametrize(("family", "shard", "indices"), CASES)
def test_bytes_between_the_parts_and_peaks_are_those_of_the_layers(
    family: str, shard: str, indices: tuple[int, ...], precision: str
) -> None:
    batch = 3
    run = StageRun(model_of(family), indices, precision, batch=batch, shard=SHARDS[shard])
    held, wanted = run.held(), predicted(run, precision, batch)
    narrower = half_of_the_statistics(run, batch) if family != "llama" and precision == "cast" else 0
    assert 0 <= held.forward - (wanted.forward - narrower) <= (SCALARS if run.has_loss else 0)
    assert 0 <= held.between - (wanted.between - narrower) <= (SCALARS if run.has_loss else 0)
    within = 0.05 if shard == "a2a" else 0.03  # copies of an exchange's gradients live for different times by width
    assert wanted.input_peak == pytest.approx(held.input_peak, rel=within)
    assert wanted.weight_peak == pytest.approx(held.weight_peak, rel=within)
    assert wanted.end == 0
    assert 0 <= held.end <= (SCALARS if run.has_loss else 0)


@pytest.mark.parametrize("precision", slow_except(["cast"], STATES))
@pytest.mark.parametrize(("indices", "batch"), [(BLOCK, 1), (BLOCKS, 2), (LAST, 2)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_peaks_where_weights_are_large_beside_activations(
    family: str, indices: tuple[int, ...], precision: str, batch: int
) -> None:
    model = model_of(family, hidden_size=256, intermediate_size=768, vocab_size=4096, seq_len=32)
    run = StageRun(model, indices, precision, batch=batch)
    held, wanted = run.held(), predicted(run, precision, batch)
    assert wanted.input_peak == pytest.approx(held.input_peak, rel=0.03)
    assert wanted.weight_peak == pytest.approx(held.weight_peak, rel=0.03)


def counted(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """What a call gives, and the matrix products and the forwards of attention cores in it."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        result = call()
    assert trace.profiler is not None
    counts = Counter(event.name() for event in trace.profiler.kineto_results.events())
    products = counts["aten::mm"] + counts["aten::addmm"]
    return result, products, counts["aten::_scaled_dot_product_flash_attention_for_cpu"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_both_parts_give_the_gradients_of_a_whole_backward(family: str, recompute: Recompute) -> None:
    run = StageRun(model_of(family), LAST, "fp32", recompute=recompute, dtype=torch.float64)
    run.backward(run.forward())
    wanted = [parameter.grad for parameter in (*run.stage.parameters(), run.input)]
    for parameter in (*run.stage.parameters(), run.input):
        parameter.grad = None
    run.second_part(run.first_part(run.forward())[1])
    gradients = [parameter.grad for parameter in (*run.stage.parameters(), run.input)]
    for grad, whole in zip(gradients, wanted, strict=True):
        assert grad is not None
        assert whole is not None
        torch.testing.assert_close(grad, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))


@pytest.mark.parametrize(("family", "matrices", "weighted"), [("gpt", 4, 6), ("llama", 7, 9)])
def test_recomputed_operators(family: str, matrices: int, weighted: int) -> None:
    """The attention core in I, once. A whole block once in I, and in W again for every operation with weights."""
    modes: tuple[tuple[Recompute, int, int], ...] = (("none", 0, 0), ("selective", 1, 0), ("full", 1, weighted))
    for recompute, in_input, in_weight in modes:
        run = StageRun(model_of(family), BLOCK, "fp32", recompute=recompute)
        out, products, attentions = counted(run.forward)
        assert (attentions, products) == (1, matrices)
        (_, left), products, attentions = counted(partial(run.first_part, out))
        assert attentions == in_input
        assert (products == matrices) == (recompute != "full")
        _, products, attentions = counted(partial(run.second_part, left))
        assert attentions == in_weight
        assert (products == matrices) == (recompute != "full")


@pytest.mark.parametrize("shard", ["tensor", "sequence"])
def test_matrices_of_gathered_tokens_are_split_as_others_are(shard: str) -> None:
    """Each product is an event twice: of the DTensors, and of what is here of them."""
    run = StageRun(model_of("llama"), BLOCK, "fp32", shard=SHARDS[shard])
    run.second_part(run.first_part(run.forward())[1])  # at first DTensor also runs products of its own, for shapes
    out, products, _ = counted(run.forward)
    assert products == 2 * 7
    (_, left), products, _ = counted(partial(run.first_part, out))
    assert products == 2 * 7
    _, products, _ = counted(partial(run.second_part, left))
    assert products == 2 * 7


@pytest.mark.usefixtures("alone")
def test_ddp_never_reduces_gradients_of_a_split_backward() -> None:
    """W assigns gradients without the hooks of autograd that DDP listens to."""
    listener: Any = Listener()
    world = dist.group.WORLD
    assert world is not None
    module = wrap_ddp(nn.Linear(2, 2), Peers.of(world, (0,), 0, listener), None)
    x = torch.ones(1, 2, requires_grad=True)
    module(x).sum().backward()
    assert [kind for kind, *_ in listener.issued] == ["all_reduce"]
    _, left = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    stage_backward_weight(module.parameters(), left)
    assert [kind for kind, *_ in listener.issued] == ["all_reduce"]


def test_the_two_functions_take_what_they_are_given() -> None:
    assert list(inspect.signature(stage_backward_input).parameters) == [
        "stage_outputs_or_loss", "output_grads", "input_values", "weights",
    ]  # fmt: skip
    assert list(inspect.signature(stage_backward_weight).parameters)[:2] == ["weights", "param_groups"]
