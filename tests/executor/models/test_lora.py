"""LoRA: what layers with adapters keep and compute, as torch accounts for it, and ranks against one process."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.models.lora import DoraLinear, LoraGroupedLinear, LoraMergedLinear, OftLinear
from simplan.model.layer import Gemm
from simplan.model.model import ModelSpec
from simplan.plan.plan import Recompute
from simplan.software.software import StateBytes
from simplan.training import TrainingSpec
from tests.executor.conftest import make_job, make_model
from tests.executor.distributed.test_level2 import check_run
from tests.executor.models.layer_runs import (
    PEAK,
    SHARDS,
    STATES,
    LayerRun,
    assert_parameters_and_order_of_gradients,
    counted_flops,
    traced,
)
from tests.support.slow import slow_except

CPU = torch.device("cpu")
BATCH = 3
FROZEN_STATES = {
    **STATES,
    "autocast": StateBytes(parameter=4, frozen=2, gradient=4, activation=2, boundary=2, weight_copy=2),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "num_key_value_heads": 4, "qk_norm": "head"},
    "mpt": {"family": "mpt"},
    "packed": {"family": "llama", "num_key_value_heads": 4, "document_lengths": (29, 3, 32)},
}


def model_of(name: str, targets: tuple[str, ...] = ("all",), **fields: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 500}
    sizes |= {"intermediate_size": 256, "seq_len": 64, "lora_rank": 4, "lora_targets": targets}
    return ModelSpec(**{**sizes, **FAMILIES[name], **fields})


TARGETS = (("all",), ("attention",), ("mlp",), ("proj", "up"), ("down",))
EXPERTS: dict[str, Any] = {
    "family": "moe", "num_experts": 4, "top_k": 2, "moe_intermediate_size": 96, "intermediate_size": 96,
    "num_key_value_heads": 4, "qk_norm": None, "capacity_factor": 1.0,
    "lora_targets": ("qkv", "router", "experts_gate", "experts_up", "experts_down"),
}  # fmt: skip
QUICK = {("llama", "whole", "fp32"), ("gpt", "sequence", "autocast"), ("packed", "tensor", "fp32")}
CASES = [
    pytest.param(name, shard, index, recompute, precision, targets, marks=marks)
    for name in FAMILIES
    for shard, parts in SHARDS.items()
    if name != "packed" or parts.cp == 1
    for index, modes in ((0, ("none",)), (1, ("none", "selective", "full")), (2, ("none", "full")), (-1, ("none",)))
    for recompute in modes
    for precision in FROZEN_STATES
    for targets in (TARGETS if shard in ("whole", "sequence") else TARGETS[:1])
    for marks in [[] if (name, shard, precision) in QUICK and recompute != "full" else [pytest.mark.slow]]
]


@pytest.mark.parametrize(("name", "shard", "index", "recompute", "precision", "targets"), CASES)
def test_kept_bytes_are_those_of_the_layer(
    name: str, shard: str, index: int, recompute: Recompute, precision: str, targets: tuple[str, ...]
) -> None:
    """To the byte, by torch's trace of allocations."""
    layer_run(model_of(name, targets), index, recompute, precision, shard).assert_kept()


def layer_run(spec: ModelSpec, index: int, recompute: Recompute, precision: str, shard: str) -> LayerRun:
    return LayerRun(spec, index, recompute, precision, SHARDS[shard], state=FROZEN_STATES[precision])


@pytest.mark.parametrize("precision", slow_except(["autocast"], FROZEN_STATES))
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shard", ["whole", "sequence"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("index", [1, 2])
def test_peak_is_that_of_the_layer(name: str, shard: str, index: int, recompute: Recompute, precision: str) -> None:
    """Where a whole block runs again with gathered tokens, the own ones of the first norm stay longer than is known."""
    within = 0.04 if (shard, recompute) == ("sequence", "full") else PEAK
    layer_run(model_of(name), index, recompute, precision, shard).assert_peak(within=within)


PARTS: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.1, "lora_targets": ("qkv", "mlp")},
    "ranks of blocks": {
        "lora_targets": ("blocks.1.attention", "mlp"),
        "lora_rank_pattern": {"blocks.1.mlp": 8, "q": 2},
    },
    "dora": {"lora_dora": True, "lora_targets": ("qkv", "down")},
    "dora upper block": {"lora_dora": True, "lora_targets": ("blocks.1.all",)},
    "upper block": {"lora_targets": ("blocks.1.all",)},
    "ends": {"lora_targets": ("embedding", "qkv", "head"), "tied_embeddings": False},
    "saved": {"lora_targets": ("q",), "lora_modules_to_save": ("embedding", "head"), "tied_embeddings": False},
    "inputs": {"lora_targets": ("blocks.1.all",), "input_require_grads": True},
    "frozen below": {"lora_rank": 0, "frozen": ("embedding", "blocks.0")},
    "frozen attention": {"lora_rank": 0, "frozen": ("attention", "norms")},
    "frozen mlp above": {"lora_rank": 0, "frozen": ("embedding", "blocks.1.mlp"), "tied_embeddings": False},
    "frozen all but the head": {"lora_rank": 0, "frozen": ("embedding", "blocks"), "tied_embeddings": False},
    "frozen head": {"lora_rank": 0, "frozen": ("head", "blocks.0.norms"), "tied_embeddings": False},
}
"""Choices of what is trained, for models of two blocks."""


@pytest.mark.parametrize("precision", slow_except(["autocast"], FROZEN_STATES))
@pytest.mark.parametrize("index", [0, 1, 2, -1])
@pytest.mark.parametrize("part", PARTS)
def test_kept_bytes_follow_what_is_trained(part: str, index: int, precision: str) -> None:
    """To the byte, by torch's trace of allocations."""
    spec = model_of("llama", **PARTS[part])
    if spec.lora_modules_to_save and precision == "autocast":
        return  # refused: the copies have the 16 bits of their originals
    state = FROZEN_STATES[precision] if spec.lora_rank else STATES[precision]
    LayerRun(spec, index, "none", precision, state=state).assert_kept()


@pytest.mark.parametrize("index", slow_except([2], [1, 2]))
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_peak_of_magnitudes_is_that_of_the_layer(name: str, recompute: Recompute, index: int) -> None:
    """With the identity and the copies of the weight that norms take; on CPUs products of two dtypes copy more."""
    layer_run(model_of(name, lora_dora=True), index, recompute, "fp32", "whole").assert_peak(within=PEAK)


@pytest.mark.parametrize("part", PARTS)
def test_flops_follow_what_is_trained(part: str) -> None:
    """FLOPs of either pass equal those of torch's counter.

    Norms of magnitudes multiply an identity with A and B: 2 r k (k + n).
    """
    spec = model_of("llama", **PARTS[part])
    forward = sum(layer.flops(full_attention=True) for layer in spec.layers)
    backward = sum(layer.backward_flops(full_attention=True) for layer in spec.layers)
    gemms = [kernel for layer in spec.layers for kernel in layer.kernels if isinstance(kernel, Gemm)]
    norms = sum(2 * gemm.norm_rank * gemm.k * (gemm.k + gemm.n) for gemm in gemms)
    assert counted_flops(spec) == pytest.approx(2 * forward + norms, rel=0.005)
    assert counted_flops(spec, backward=True) == pytest.approx(2 * backward, rel=0.005)


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_merged_experts_take_what_is_predicted(recompute: Recompute, index: int) -> None:
    """Kept bytes and peak of the sums of experts and adapters, and FLOPs of making them, in either pass."""
    spec = model_of("llama", **EXPERTS)
    run = layer_run(spec, index, recompute, "fp32", "whole")
    run.assert_kept()
    run.assert_peak(within=PEAK)
    gemms = [kernel for layer in spec.layers for kernel in layer.kernels if isinstance(kernel, Gemm)]
    merges = sum(2 * gemm.merged_rank * gemm.weight_elements for gemm in gemms)  # B A for each weight
    forward = sum(layer.flops(full_attention=True) for layer in spec.layers)
    backward = sum(layer.backward_flops(full_attention=True) for layer in spec.layers)
    assert counted_flops(spec) == pytest.approx(2 * forward + merges, rel=0.01)
    assert counted_flops(spec, backward=True) == pytest.approx(2 * backward + 2 * merges, rel=0.01)
    assert_parameters_and_order_of_gradients(spec)


@pytest.mark.parametrize("part", PARTS)
def test_gradients_follow_what_is_trained(part: str) -> None:
    assert_parameters_and_order_of_gradients(model_of("llama", **PARTS[part]))


@pytest.mark.parametrize(
    "targets", [pytest.param(t, marks=[pytest.mark.slow] if t in TARGETS[2:] else []) for t in TARGETS]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_that_torch_counts(name: str, targets: tuple[str, ...]) -> None:
    """Of either pass."""
    spec = model_of(name, targets)
    for backward in (False, True):
        layers = (
            layer.backward_flops(full_attention=True) if backward else layer.flops(full_attention=True)
            for layer in spec.layers
        )
        assert counted_flops(spec, backward=backward) == pytest.approx(2 * sum(layers), rel=0.005)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_the_order_of_their_gradients(name: str) -> None:
    assert_parameters_and_order_of_gradients(model_of(name))


RANKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "zero3-oft": ("none", {"family": "llama", "lora_oft": True}, {"dp_shard": 2}),
    "ddp-oft": ("none", {"family": "llama", "lora_oft": True}, {"dp_replicate": 2, "recompute": "full"}),
    "ddp": ("none", {}, {"dp_replicate": 2, "bucket_bytes": 4_000}),
    "zero1": ("none", {"family": "llama"}, {"dp_shard": 2, "zero_stage": 1}),
    "zero2": ("none", {"family": "llama", "lora_targets": ("q", "v")}, {"dp_shard": 2, "zero_stage": 2}),
    "zero3": ("none", {"family": "llama"}, {"dp_shard": 2}),
    "zero3-tied": ("none", {}, {"dp_shard": 2}),
    "zero3-once-a-step": ("none", {"family": "mpt"}, {"dp_shard": 2, "grad_sync": "step"}),
    "1f1b": ("1f1b", {}, {"pp": 2}),
    "1f1b-packed": ("1f1b", {"family": "llama", "document_lengths": (7, 2, 5)}, {"pp": 2}),
    "zero3-packed": ("none", {"family": "llama", "document_lengths": (7, 2, 5)}, {"dp_shard": 2}),
    "interleaved": ("interleaved_1f1b", {"family": "llama", "num_hidden_layers": 4}, {"pp": 2, "virtual_stages": 2}),
    "tp": ("none", {"family": "llama", "vocab_size": 96}, {"tp": 2, "sequence_parallel": False}),
    "tp-sequence": ("none", {"vocab_size": 96, "lora_targets": ("attention", "down")}, {"tp": 2}),
    "cp-zero3": ("none", {"family": "llama"}, {"cp": 2, "cp_comm": "all_gather", "zero_stage": 3}),
    "ddp-recompute": ("none", {"family": "llama"}, {"dp_replicate": 2, "recompute": "full", "bucket_bytes": 4_000}),
    "hsdp": ("none", {"family": "llama"}, {"dp_replicate": 2, "dp_shard": 2}),
    "1f1b-zero3": ("1f1b", {"family": "llama"}, {"pp": 2, "dp_shard": 2}),
    "tp-zero3": ("none", {"vocab_size": 96}, {"tp": 2, "dp_shard": 2}),
    "zero3-offload": ("none", {"family": "llama"}, {"dp_shard": 2, "offload_optimizer": True}),
    "zero3-offload-frozen": (
        "none",
        {"family": "llama", "lora_rank": 0, "frozen": ("embedding", "blocks.0")},
        {"dp_shard": 2, "offload_optimizer": True},
    ),
    "zero3-offload-activations": ("none", {"family": "llama"}, {"dp_shard": 2, "offload_activations": True}),
    "ddp-dora": ("none", {"lora_dora": True}, {"dp_replicate": 2}),
    "zero3-dora": ("none", {"family": "llama", "lora_dora": True}, {"dp_shard": 2, "recompute": "full"}),
    "ddp-experts": ("none", EXPERTS | {"hidden_size": 32, "capacity_factor": 4.0}, {"dp_replicate": 2}),
    "zero3-experts": (
        "none",
        EXPERTS | {"hidden_size": 32, "capacity_factor": 4.0},
        {"dp_shard": 2, "recompute": "full"},
    ),
    "ddp-upper": ("none", {"family": "llama", "lora_targets": ("blocks.1.all", "head")}, {"dp_replicate": 2}),
    "zero3-upper": ("none", {"family": "llama", "lora_targets": ("blocks.1.all",)}, {"dp_shard": 2}),
    "zero3-ends": (
        "none",
        {"family": "llama", "lora_targets": ("embedding", "qkv", "head"), "lora_rank_pattern": {"q": 8}},
        {"dp_shard": 2},
    ),
    "ddp-saved": ("none", {"family": "llama", "lora_modules_to_save": ("embedding", "head")}, {"dp_replicate": 2}),
    "ddp-frozen": ("none", {"lora_rank": 0, "frozen": ("embedding", "blocks.0")}, {"dp_replicate": 2}),
    "zero1-frozen": ("none", {"lora_rank": 0, "frozen": ("attention", "norms")}, {"dp_shard": 2, "zero_stage": 1}),
    "zero3-frozen": (
        "none",
        {"family": "llama", "lora_rank": 0, "frozen": ("embedding", "blocks.0", "blocks.1.mlp")},
        {"dp_shard": 2},
    ),
    "zero3-head": ("none", {"family": "llama", "lora_rank": 0, "frozen": ("embedding", "blocks")}, {"dp_shard": 2}),
    "ddp-inputs-recompute": (
        "none",
        {"family": "llama", "lora_targets": ("blocks.1.all",), "input_require_grads": True},
        {"dp_replicate": 2, "recompute": "full"},
    ),
    "zero3-recompute-frozen": (
        "none",
        {"family": "llama", "lora_rank": 0, "frozen": ("embedding", "blocks.0")},
        {"dp_shard": 2, "recompute": "full"},
    ),
}


@pytest.mark.parametrize("name", slow_except(["1f1b-packed", "zero3-frozen"], RANKS))
def test_ranks_equal_one_process_and_issue_what_is_predicted(name: str, tmp_path: Path) -> None:
    """Losses and gradients of what is trained, in float64; collectives twice as wide as in float32."""
    schedule, fields, plan = RANKS[name]
    heads = {"num_key_value_heads": 4} if fields.get("family") == "mpt" else {}
    model = make_model(**{"lora_rank": 4, **heads, **fields})
    job = make_job(schedule, model=model, plan=plan, dtype="fp64")
    training = TrainingSpec(global_batch_size=job.training.global_batch_size, precision="fp32")
    training = training.with_changes(task="lora" if model.lora_rank else "sft")
    check_run(job.model_copy(update={"training": training}), tmp_path)


@pytest.mark.parametrize("bias", [False, True])
def test_magnitudes_are_those_of_peft(bias: bool) -> None:
    """Outputs, gradients, and bytes kept for backward, to the number that autograd wraps."""
    peft = pytest.importorskip("peft")
    linear = torch.nn.Linear(96, 64, bias=bias)
    layer = DoraLinear(linear, 4)
    config = peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=["0"])
    theirs = peft.get_peft_model(torch.nn.Sequential(copy.deepcopy(linear)), config)
    module: Any = theirs.base_model.model[0]
    with torch.no_grad():
        layer.load_state_dict(linear.state_dict(), strict=False)
        for mine, other in (
            (layer.lora_a.weight, module.lora_A["default"].weight),
            (layer.lora_b.weight, module.lora_B["default"].weight),
            (layer.magnitude, module.lora_magnitude_vector["default"].weight),
        ):
            mine.copy_(torch.rand_like(mine))
            other.copy_(mine)
    layer.weight.requires_grad_(False)
    if layer.bias is not None:
        layer.bias.requires_grad_(False)
    x = torch.randn(3, 16, 96)
    saved = []
    runs: tuple[tuple[Any, list[torch.Tensor]], ...] = (
        (layer, [layer.lora_a.weight, layer.lora_b.weight, layer.magnitude]),
        (module, [p for p in module.parameters() if p.requires_grad]),
    )
    for run, weights in runs:
        result, kept, peak = traced(partial(run, x))
        gradients = torch.autograd.grad(result.square().sum(), sorted(weights, key=torch.Tensor.numel))
        saved.append((result, gradients, kept, peak))
    (result, gradients, kept, peak), (wanted, their_gradients, their_kept, their_peak) = saved
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(gradients, their_gradients)
    assert kept == their_kept
    assert peak == pytest.approx(their_peak, rel=0.1)


@pytest.mark.parametrize("shape", [(3, 48, 32), (48, 32)], ids=["experts", "router"])
def test_experts_and_routers_with_adapters_are_those_of_peft(shape: tuple[int, ...]) -> None:
    """Outputs and gradients of a parameter of three or two dimensions that PEFT wraps."""
    peft = pytest.importorskip("peft")
    *e, n, k = shape
    rank = 4

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(*shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.transpose(-1, -2)

    experts = Experts()
    linear = torch.nn.Linear(k, n, bias=False)
    layer = LoraGroupedLinear(experts.weight, rank) if e else LoraMergedLinear(linear, rank)
    layer.weight = torch.nn.Parameter(experts.weight.detach().clone(), requires_grad=False)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=["experts.weight"])
    model = peft.get_peft_model(torch.nn.ModuleDict({"experts": experts}), config)
    wrapper = model.base_model.model["experts"]
    theirs = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    with torch.no_grad():
        for mine, other in zip((layer.lora_a.weight, layer.lora_b.weight), theirs, strict=True):
            assert mine.shape == other.shape
            mine.copy_(torch.rand_like(mine))
            other.copy_(mine)
    x = torch.randn(*e, 7, k)
    results = layer(x), wrapper(x)
    torch.testing.assert_close(*results)
    gradients = [
        torch.autograd.grad(result.square().sum(), weights)
        for result, weights in zip(results, ((layer.lora_a.weight, layer.lora_b.weight), theirs), strict=True)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_are_those_of_peft(dtype: torch.dtype) -> None:
    """Outputs, gradients, bytes kept for backward and the peak, under autocast where the frozen matrix has 16 bits."""
    peft = pytest.importorskip("peft")
    linear = torch.nn.Linear(96, 64, dtype=dtype)
    layer = OftLinear(linear, 3)
    theirs = peft.get_peft_model(
        torch.nn.Sequential(copy.deepcopy(linear)), peft.OFTConfig(r=0, oft_block_size=32, target_modules=["0"])
    )
    module: Any = theirs.base_model.model[0]
    other = module.oft_R["default"].weight
    with torch.no_grad():
        layer.load_state_dict(linear.state_dict(), strict=False)
        layer.oft_r.weight.normal_(0.0, 0.02)
        other.data = layer.oft_r.weight.data.clone()
    for name, parameter in layer.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "oft_r" in name else dtype)
        parameter.requires_grad_("oft_r" in name)
    x, saved = torch.randn(3, 16, 96, dtype=dtype), []
    for run, weight in ((layer, layer.oft_r.weight), (module, other)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16, cache_enabled=False):
            result, kept, peak = traced(partial(run, x))
        saved.append((result, torch.autograd.grad(result.float().square().sum(), weight), kept, peak))
    (result, gradients, kept, peak), (wanted, their_gradients, their_kept, their_peak) = saved
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(gradients, their_gradients)
    indices = 2 * 8 * 32 * 31 // 2  # which PEFT's module holds on to
    assert kept == pytest.approx(their_kept, abs=indices)
    assert peak == pytest.approx(their_peak, abs=indices)


@pytest.mark.parametrize(
    ("recompute", "precision", "targets"),
    slow_except(
        {("none", "autocast", ("all",))},
        [(r, p, t) for r in ("none", "full") for p in ("fp32", "autocast") for t in (("all",), ("q", "gate"))],
    ),
)
def test_rotations_keep_and_take_what_is_predicted(recompute: Recompute, precision: str, targets: tuple[str]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "seq_len": 128}
    spec = model_of("llama", targets, **sizes, lora_rank=32, lora_oft=True)
    run = LayerRun(spec, 2, recompute, precision, state=FROZEN_STATES[precision])
    outputs, held, _ = traced(run.forward)
    del outputs
    indices = 16 * 32 * 31 // 2 * len(targets) * 7  # of the numbers above diagonals
    made = BATCH * run.layer.output_bytes(run.state.activation, run.state.residual)[0]
    assert 0 <= held - made - run.kept_bytes() <= indices
    run.assert_peak(within=0.035)  # as with LoRA, whose frozen linear layers save no input either
