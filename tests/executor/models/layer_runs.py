"""Layers run alone, and what torch accounts of them beside what LayerSpec says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from executor.distributed.mesh import ParallelDims
from executor.models.model import Stage, build_stage
from executor.train.data import model_batch
from executor.train.loss import cross_entropy, split_loss
from simplan.model.families import FAMILIES
from simplan.model.implementations.layer_implementation import ModelCode
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import Recompute
from simplan.plan.shard import Shard
from simplan.program.memory.footprint import LayerFootprint, layer_footprint
from simplan.program.program import gc_paused
from simplan.software.software import StateBytes

CPU = torch.device("cpu")
BATCH = 3
PEAK = 0.03
FACTOR = 8  # of a product with a number
FACTORS = 16  # of a scaled tanh, which autograd keeps as tensors
SCALARS = 16  # the loss, and the sum of weights that it is divided by
STATES = {
    "fp32": StateBytes(parameter=4, gradient=4, activation=4, boundary=4),
    "autocast": StateBytes(parameter=4, gradient=4, activation=2, residual=4, boundary=4, weight_copy=2),
    "cast": StateBytes(parameter=2, gradient=2, activation=2, boundary=2),
}
SHARDS = {
    "whole": Shard(),
    "tensor": Shard(tp=2),
    "sequence": Shard(tp=2, sequence_parallel=True),
    "all_gather": Shard(cp=2, cp_comm="all_gather"),
    "a2a": Shard(cp=2, cp_comm="a2a"),
    "sequence-a2a": Shard(tp=2, sequence_parallel=True, cp=2, cp_comm="a2a"),
}
WITH_LAYER_NORM = ("gpt", "mpt", "neox", "bert", "vit")


def traced(run: Callable[[], Any], *, onednn: bool = False) -> tuple[Any, int, int]:
    """What it gives, the bytes it leaves allocated, and the most it had.

    Without oneDNN: on CPUs with AVX-512 it copies bf16 matrices into a scratch of its own, as no GPU kernel does.
    Convolutions need it, for without it they make a copy of every window. Without garbage collection: what an earlier
    trace left in cycles must not be released in this one.
    """
    was_enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment] # a property of the module
    try:
        with gc_paused(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            result = run()
    finally:
        torch.backends.mkldnn.enabled = was_enabled  # a property too
    assert trace.profiler is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, held, peak


class LayerRun:
    """One layer of a model, run forward and backward on what the layer before it would give, once it is prepared.

    It gets what a frozen layer gives where nothing before it is trained.
    """

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        recompute: Recompute,
        precision: str,
        shard: Shard = SHARDS["whole"],
        *,
        state: StateBytes | None = None,
        prepare: Callable[[Stage], object] = lambda _: None,
    ) -> None:
        layers, self._precision, self._parallel = spec.layers_of(shard), precision, ParallelDims.silent(shard)
        index %= len(layers)
        self.layer, self.state, self._recompute = layers[index], state or STATES[precision], recompute
        narrow_weights = self.state.residual == 2 and precision != "autocast"
        dtype = torch.bfloat16 if narrow_weights else torch.float32
        frozen = torch.bfloat16 if spec.lora_rank and precision != "fp32" else dtype
        scaled = FACTOR if self.layer.kind is LayerKind.EMBEDDING and spec.family.startswith("gemma") else 0
        self._numbers_bytes = FACTORS if FAMILIES[spec.family].soft_cap else scaled
        self._fp32_norms = frozen is torch.float32 or spec.family not in WITH_LAYER_NORM
        self._stage = build_stage(spec, [index], dtype, CPU, 0, self._parallel, recompute, frozen_dtype=frozen)
        prepare(self._stage)
        batch = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=BATCH)
        inputs, self._targets = map(self._parallel.local_tokens, batch)
        self._inputs = [inputs.to(dtype) if inputs.is_floating_point() else inputs]
        if index:
            before = layers[index - 1]
            narrow = before.matmul_dtype_outputs if precision == "autocast" else ()
            trained = self.layer.needs_input_gradient
            self._inputs = [
                torch.randn(BATCH, *shape, dtype=torch.bfloat16 if number in narrow else frozen).requires_grad_(trained)
                for number, shape in enumerate(before.output_shapes)
            ]
        for parameter in self._stage.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.backward(self.forward())  # whatever torch makes once
        for x in self._inputs:
            x.grad = None  # a release of what is older than a trace would count in it, or would not

    def forward(self) -> list[Tensor]:
        """Its outputs, or the loss."""
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with autocast if self._precision == "autocast" else nullcontext():
            out = self._stage(*self._inputs)
        if self.layer.kind is LayerKind.HEAD:
            with split_loss(self._parallel):
                return [cross_entropy(out, self._targets, self._parallel)]
        return list(out) if isinstance(out, tuple) else [out]

    def backward(self, outputs: list[Tensor]) -> None:
        """From a sum of all outputs, so that their gradients are autograd's alone, as within a model."""
        total = torch.stack([(2.0 * out).sum() for out in outputs]).sum()
        outputs.clear()
        if total.requires_grad:
            with split_loss(self._parallel):
                total.backward()  # type: ignore[no-untyped-call]

    def footprint(self, layer: LayerSpec | None = None) -> LayerFootprint:
        """As it is predicted, of the layer or of the same in another style."""
        layer = layer or self.layer
        return layer_footprint(layer, BATCH, self.state, recomputation(layer, self._recompute))

    def kept_bytes(self, layer: LayerSpec | None = None) -> int:
        """What forward is predicted to leave, but for its input and what it hands on."""
        layer, footprint = layer or self.layer, self.footprint(layer)
        saved = recomputation(layer, self._recompute).saved
        kept = [tensor for tensor in layer.saved if tensor.name in saved]
        widths = self.state.activation, self.state.residual
        left_out = sum(tensor.num_bytes(*widths) for tensor in kept if tensor.forwarded)
        if not self._fp32_norms:  # statistics of LayerNorm whose input has 16 bits: fp32 on CUDA only
            left_out += sum(2 * tensor.elements for tensor in kept if tensor.name.endswith("statistics"))
        return footprint.activations + footprint.logits - footprint.input_bytes - BATCH * left_out

    def assert_kept(self, *, onednn: bool = False, also_bytes: int = 0, layer: LayerSpec | None = None) -> None:
        """What forward leaves is, to the byte, what the layer keeps; with so much more that is not a layer's."""
        made = BATCH * self.layer.output_bytes(self.state.activation, self.state.residual)[0]
        outputs, held, _ = traced(self.forward, onednn=onednn)
        allowed = SCALARS if self.layer.kind is LayerKind.HEAD else 0
        allowed += self._numbers_bytes
        allowed += FACTOR * sum(p.name.endswith(".magnitude") for p in self.layer.parameters)
        assert 0 <= held - made - self.kept_bytes(layer) - also_bytes <= allowed
        del outputs

    def assert_peak(self, *, onednn: bool = False, within: float = PEAK) -> None:
        """Of forward and backward; outputs are gone when backward runs, as those that a layer hands on."""
        footprint, peak = self.footprint(), self.peak(onednn=onednn)
        kept = footprint.activations + footprint.logits - footprint.input_bytes
        assert kept + max(map(sum, footprint.forward + footprint.backward)) == pytest.approx(peak, rel=within)

    def peak(self, *, onednn: bool = False) -> int:
        """Most bytes of a forward and a backward."""
        return traced(lambda: self.backward(self.forward()), onednn=onednn)[2]


def assert_kept_and_peak(spec: ModelSpec, index: int, recompute: Recompute, precision: str) -> None:
    """Of a whole layer; the head's peak, its logits, is not looked at."""
    run = LayerRun(spec, index, recompute, precision)
    run.assert_kept()
    if run.layer.kind is not LayerKind.HEAD:
        run.assert_peak()


def assert_parameters_and_order_of_gradients(
    spec: ModelSpec, layers: Sequence[LayerSpec] | None = None, model_code: ModelCode = "framework"
) -> None:
    """Of whole models: shapes, what is frozen, the order in which gradients are complete; names of our own modules."""
    layers = layers or spec.layers
    stage = build_stage(spec, range(len(layers)), torch.float32, CPU, seed=0, model_code=model_code)
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    order: list[str] = []
    for parameter in stage.parameters():
        if parameter.requires_grad:
            hook = partial(lambda name, _: order.append(name), names[id(parameter)])
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    inputs, targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=BATCH)
    cross_entropy(stage(inputs), targets).backward()  # type: ignore[no-untyped-call]
    wanted: list[str] = []
    for layer, module in reversed(list(zip(layers, stage.layers.values(), strict=True))):
        named = list(module.named_parameters())
        shapes = [(tuple(p.shape), not p.requires_grad) for _, p in named]
        assert shapes == [(p.shape, p.frozen) for p in layer.parameters]
        if model_code == "framework":
            assert [without_levels(name) for name, _ in named] == [p.name for p in layer.parameters]
        in_order = [named[i][1] for i in layer.gradient_order if layer.parameters[i].name not in layer.tied]
        wanted += [names[id(parameter)] for parameter in in_order]
    assert order == wanted


def without_levels(name: str) -> str:
    """Name of a parameter in a LayerSpec, which has no modules inside of each other."""
    return re.sub(r"\b(attention|mlp)\.", "", name).replace("shared.", "shared_")


def counted_flops(spec: ModelSpec, *, backward: bool = False) -> int:
    """Of a forward or a backward of two samples without data; torch counts all scores, whatever masks them."""
    meta = torch.device("meta")
    with FlopCounterMode(display=False) as counter:
        stage = build_stage(spec, range(len(spec.layers)), torch.float32, meta, seed=0)
        inputs, _ = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=2)
        out = stage(inputs.to(meta))
        forward: int = counter.get_total_flops()
        if not backward:
            return forward
        out.sum().backward()
    both: int = counter.get_total_flops()
    return both - forward
