"""Layers of all families: their modules against what LayerSpec says of them, as torch itself accounts for it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from executor import tensor_parallel
from executor.data import model_batch
from executor.loss import cross_entropy
from executor.model import build_stage
from executor.parallel import Parallel
from simplan.program.footprint import layer_footprint
from simplan.spec.layer import LayerKind, LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import Recompute
from simplan.spec.recompute import recomputation
from tests.executor.family_models import VARIANTS, variant
from tests.executor.test_recompute import SCALARS, SHARDS, STATES, traced

CPU = torch.device("cpu")
FACTORS = 16  # of a scaled tanh, which autograd keeps as tensors
BATCH = 3


class LayerRun:
    """One layer, run forward and backward."""

    def __init__(self, spec: ModelSpec, shard: str, index: int, recompute: Recompute, precision: str) -> None:
        self._precision, self._parallel = precision, Parallel.silent(SHARDS[shard])
        self.layer: LayerSpec = spec.layers_of(SHARDS[shard])[index]
        self.state = STATES[precision]
        dtype = torch.bfloat16 if precision == "cast" else torch.float32
        self._stage = build_stage(spec, [index % len(spec.layers)], dtype, CPU, 0, self._parallel, recompute)
        inputs, targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=BATCH)
        self._targets, self._input = self._parallel.local_tokens(targets), self._parallel.local_tokens(inputs)
        if self._input.is_floating_point():
            self._input = self._input.to(dtype)
        if self.layer.kind is not LayerKind.EMBEDDING:
            (shape,) = spec.layers_of(SHARDS[shard])[0].output_shapes
            self._input = torch.randn(BATCH, *shape, dtype=dtype).requires_grad_()
        for parameter in self._stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.backward(self.forward())  # whatever torch makes once
        self._input.grad = None  # a release of what is older than a trace would count in it, or would not

    def forward(self) -> Tensor:
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with autocast if self._precision == "autocast" else nullcontext():
            out: Tensor = self._stage(self._input)
        return cross_entropy(out, self._targets, self._parallel) if self.layer.kind is LayerKind.HEAD else out

    def backward(self, out: Tensor) -> None:
        loss = out if out.dim() == 0 else (2.0 * out).sum()  # the gradient of the output is autograd's alone
        loss.backward()  # type: ignore[no-untyped-call]


def shards_of(name: str) -> list[str]:
    """In which ways a model can be split."""
    if name in ("bert", "gemma2"):
        return ["whole", "tensor", "sequence"]
    return ["whole", "tensor"] if name == "vit" else list(SHARDS)


QUICK = ("qk-norm", "mpt", "neox", "gemma2", "bert", "vit")


def quick(name: str, shard: str, precision: str, recompute: str = "none") -> list[Any]:
    """Marks: whole layers in every precision, and their parts in fp32, are looked at in every run of the tests."""
    quickly = name in QUICK and (shard == "whole" or precision == "fp32") and recompute != "selective_op"
    return [] if quickly else [pytest.mark.slow]


AT_THE_LAST_SUM = ("bert", "tensor", "full", "autocast")
"""Its worst moment is at the end of what runs again: the sum that is normed then, beside all that it is made of."""
KEPT = [
    pytest.param(name, shard, index, recompute, precision, marks=quick(name, shard, precision, recompute))
    for name in VARIANTS
    for shard in shards_of(name)
    for index, modes in ((0, ("none",)), (1, ("none", "selective", "selective_op", "full")), (-1, ("none",)))
    for recompute in modes
    for precision in STATES
]
PEAKS = [
    pytest.param(
        *case, marks=[] if case == AT_THE_LAST_SUM else [pytest.mark.slow] if shard == "tensor" else quick_marks
    )
    for name in VARIANTS
    for shard in ("whole", "tensor", "sequence")
    if shard in shards_of(name)
    for recompute in ("none", "full", "selective_op")
    for precision in STATES
    for case in [(name, shard, recompute, precision)]
    for quick_marks in [quick(name, shard, precision, recompute)]
]


@pytest.mark.parametrize(("name", "shard", "index", "recompute", "precision"), KEPT)
def test_kept_bytes_are_those_of_the_layer(
    name: str, shard: str, index: int, recompute: Recompute, precision: str
) -> None:
    """To the byte, by torch's trace of allocations."""
    run = LayerRun(variant(name), shard, index, recompute, precision)
    out, held, _ = traced(run.forward)
    kept = recomputation(run.layer, recompute)
    footprint = layer_footprint(run.layer, BATCH, run.state, kept)
    wanted = footprint.activations + footprint.logits - footprint.input_bytes
    if name in ("mpt", "neox", "bert", "vit") and precision == "cast":  # LayerNorm's: fp32 on CUDA only
        wanted -= BATCH * sum(
            2 * t.elements for t in run.layer.saved if t.name in kept.saved and t.name.endswith("statistics")
        )
    result = 0 if out.dim() == 0 else out.nbytes
    scalars = SCALARS if run.layer.kind is LayerKind.HEAD else 0
    scalars += FACTORS if name == "gemma2" else 0
    assert 0 <= held - result - wanted <= scalars


@pytest.mark.parametrize(("name", "shard", "recompute", "precision"), PEAKS)
def test_peak_of_backward_is_that_of_the_layer(name: str, shard: str, recompute: Recompute, precision: str) -> None:
    """Of a block; the test also holds its output, but not its input, which was there before."""
    run = LayerRun(variant(name), shard, 1, recompute, precision)
    footprint = layer_footprint(run.layer, BATCH, run.state, recomputation(run.layer, recompute))
    _, _, peak = traced(lambda: run.backward(run.forward()))
    kept = footprint.activations - footprint.input_bytes + footprint.output_bytes
    assert kept + footprint.backward_workspace == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layer_index", [0, 1, -1])
def test_parameters_are_those_of_the_layer(name: str, layer_index: int) -> None:
    spec = variant(name)
    index = layer_index % len(spec.layers)
    stage = build_stage(spec, [index], torch.float32, CPU, seed=0)
    found = [(name, tuple(p.shape)) for name, p in stage.layers[str(index)].named_parameters()]
    assert found == [(p.name, p.shape) for p in spec.layers[index].parameters]


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_complete_in_the_order_of_the_layers(name: str) -> None:
    spec = variant(name)
    stage = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, seed=0)
    order: list[str] = []
    for parameter_name, parameter in stage.named_parameters():
        hook = partial(lambda name, _: order.append(name), parameter_name)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    inputs, targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=BATCH)
    cross_entropy(stage(inputs), targets).backward()  # type: ignore[no-untyped-call]
    wanted = []
    for index, layer in reversed(list(enumerate(spec.layers))):
        names = [layer.parameters[i].name for i in layer.gradient_order]
        wanted += [f"layers.{index}.{name}" for name in names if name not in layer.tied]
    assert order == wanted


LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816, "vocab_size": 8192,
              "seq_len": 512, "qkv_bias": True, "qk_norm": "head"},
    "mpt": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "gpt": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "neox": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "gemma2": {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128,
               "intermediate_size": 3072, "vocab_size": 8192, "seq_len": 512},
    "bert": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "vit": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_classes": 1000},
}  # fmt: skip


@pytest.mark.parametrize("family", LARGE)
def test_flops_are_those_that_torch_counts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward of two sequences on tensors without data; torch counts all scores, whatever masks them."""
    monkeypatch.setattr(tensor_parallel, "compute_dtype", lambda x: x)  # there is no autocast on meta tensors
    spec = ModelSpec(family=family, num_hidden_layers=2, **LARGE[family])
    meta = torch.device("meta")
    stage = build_stage(spec, range(len(spec.layers)), torch.float32, meta, seed=0)
    inputs, _ = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=2)
    with FlopCounterMode(display=False) as counter:
        stage(inputs.to(meta))
    wanted = 2 * sum(layer.flops(full_attention=True) for layer in spec.layers)
    assert counter.get_total_flops() == pytest.approx(wanted, rel=0.005)


@pytest.mark.parametrize("shard", ["whole", "tensor", "all_gather", "a2a"])
@pytest.mark.parametrize("name", ["mpt", "window"])
def test_tables_of_scores_are_the_constants_of_the_layer(name: str, shard: str) -> None:
    """One for all blocks of a stage, with a row for every query and, with ALiBi, for every head."""
    spec, parallel = variant(name), Parallel.silent(SHARDS[shard])
    stage: Any = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, 0, parallel)
    inputs, _ = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=1)
    stage(parallel.local_tokens(inputs))
    tables = {id(core): core._table for core in (stage.layers[index]._attention._core for index in ("1", "2"))}
    wanted = [t.elements for t in spec.layers_of(SHARDS[shard])[1].constants if t.name == "attention mask"]
    assert [table.numel() for table in tables.values()] == wanted
