"""Layers of torchtune against modules written as torchtune writes them, in what autograd saves and allocates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

from executor.dry_run.memory_tracker import StorageTracker
from simplan import catalog
from simplan.model.fake_quantization import FakeQuantization
from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec
from simplan.model.recompute import Recomputation
from simplan.plan.plan import ParallelPlan
from simplan.program.memory.liveness import Points, backward_points, forward_points
from simplan.program.memory.tensors import LayerTensors
from simplan.training import TrainingSpec
from tests.model.implementations.test_litgpt_code import Attend, saved_by
from tests.support.slow import slow_except

SIZES: dict[str, Any] = {
    "family": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8,
    "vocab_size": 320, "seq_len": 256, "tied_embeddings": False,
}  # fmt: skip
BATCH, RANK, CHUNKS, GROUP = 2, 4, 8, 32
INT4 = torch.int4  # type: ignore[attr-defined]  # torch has no types for it


class Norm(nn.Module):
    """torchtune/modules/rms_norm.py, RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        x_normed = (x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return x_normed * self.scale


class Adapted(nn.Module):
    """torchtune/modules/peft/lora.py, LoRALinear, or with ``rounds`` QATLoRALinear."""

    def __init__(self, inputs: int, outputs: int, rank: int, *, rounds: bool = False) -> None:
        super().__init__()
        self.of_input = self.of_weight = nn.Identity()
        if rounds:
            self.of_input = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False))
            form = IntxFakeQuantizeConfig(INT4, group_size=GROUP, is_symmetric=True)
            self.of_weight = IntxFakeQuantizer(form)
        self.weight = nn.Parameter(torch.ones(outputs, inputs))
        if rank:
            self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        out = functional.linear(self.of_input(x), self.of_weight(self.weight))
        if not self.rank:
            return out
        lora_out = self.lora_a(x)
        lora_out = 2.0 * self.lora_b(lora_out)
        result: Tensor = out + lora_out
        return result


class Block(nn.Module):
    """torchtune/modules/transformer.py, TransformerSelfAttentionLayer with its attention, rotation and MLP."""

    def __init__(self, spec: ModelSpec, rank: int, *, rounds: bool = False) -> None:
        super().__init__()
        h, width = spec.hidden_size, spec.intermediate_size
        adapted = partial(Adapted, rank=rank, rounds=rounds)
        self.heads, self.groups, self.size = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        self.sa_norm, self.mlp_norm = Norm(h), Norm(h)
        self.q_proj, self.output_proj = adapted(h, h), adapted(h, h)
        self.k_proj, self.v_proj = (adapted(h, self.groups * self.size) for _ in "kv")
        self.w1, self.w3, self.w2 = adapted(h, width), adapted(h, width), adapted(width, h)
        self.register_buffer("cache", torch.ones(spec.seq_len, self.size // 2, 2))

    def _rotated(self, x: Tensor) -> Tensor:
        shaped = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = self.get_buffer("cache").view(-1, shaped.size(1), 1, shaped.size(3), 2)
        out = torch.stack(
            [
                shaped[..., 0] * cache[..., 0] - shaped[..., 1] * cache[..., 1],
                shaped[..., 1] * cache[..., 0] + shaped[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return out.flatten(3).type_as(x)

    def _attend(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, -1, self.size)
        q = self._rotated(q).transpose(1, 2)
        k, v = self.k_proj(x), self.v_proj(x)
        k, v = k.view(b, s, -1, self.size), v.view(b, s, -1, self.size)
        k, v = self._rotated(k).transpose(1, 2), v.transpose(1, 2)
        if self.heads != self.groups:
            shape = (b, self.groups, self.heads // self.groups, -1, self.size)
            k, v = (heads.unsqueeze(2).expand(shape).flatten(1, 2) for heads in (k, v))
        output = Attend.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch has no types for it
        result: Tensor = self.output_proj(output.transpose(1, 2).contiguous().view(b, s, -1))
        return result

    def forward(self, x: Tensor) -> Tensor:
        h = self._attend(self.sa_norm(x)) + x
        normed = self.mlp_norm(h)
        result: Tensor = h + self.w2(functional.silu(self.w1(normed)) * self.w3(normed))
        return result


def predicted(
    kind: LayerKind, options: dict[str, Any], form: FakeQuantization | None = None, **software: Any
) -> LayerTensors:
    """Tensors of the last layer of a kind."""
    spec, plan = ModelSpec(**SIZES | options), ParallelPlan(microbatch_size=BATCH)
    task: Any = "lora" if spec.lora_rank else "sft"
    training = TrainingSpec(global_batch_size=BATCH, precision="bf16", task=task, fake_quantization=form)
    profile = catalog.software("torchtune").model_copy(update=software)
    layer = [candidate for candidate in profile.layers_of(spec, plan, training) if candidate.kind is kind][-1]
    saved = Recomputation(frozenset(tensor.name for tensor in layer.saved))
    return LayerTensors(layer, BATCH, profile.state(training, plan), saved)


def inputs() -> Tensor:
    return torch.ones(BATCH, SIZES["seq_len"], SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)


def peaks_of(module: nn.Module, run: Any = None) -> tuple[int, int]:
    """Bytes of forward and of backward at their peaks, besides weights, their sums of gradients and the input."""
    x, tracker = inputs(), StorageTracker()
    tensors_alive = [*module.parameters(), *module.buffers(), x]
    for tensor in (tensor for tensor in tensors_alive if tensor.requires_grad):
        tensor.grad = torch.zeros_like(tensor)
    with tracker.counting():
        known = [tensor.detach() for tensor in tensors_alive]
        known += [tensor.grad.detach() for tensor in tensors_alive if tensor.grad is not None]
        before = tracker.total_bytes
        result = (run or module)(x)
        forward = tracker.peak_bytes - before
        tracker.peak_bytes = tracker.total_bytes
        result.backward(torch.ones_like(result))
    return forward, tracker.peak_bytes - before - result.nbytes  # which the next layer would hold, if at all


def peaks_predicted(tensors: LayerTensors) -> tuple[int, int]:
    """Peaks of forward and backward as predicted, from the points of a layer."""
    saved_elements = tensors.saved_bytes + tensors.saved_logits

    def largest(points: Points) -> int:
        return max(saved_elements + p.workspace + p.logits + p.gradients for _, p in points)

    return largest(forward_points(tensors)), largest(backward_points(tensors))


@pytest.mark.parametrize(("groups", "rank"), slow_except([(2, RANK), (8, 0)], [(2, RANK), (8, 0), (8, RANK), (2, 0)]))
def test_blocks_save_what_autograd_saves(groups: int, rank: int) -> None:
    """With adapters and in full training; with keys of every head, and of groups of heads."""
    options: dict[str, Any] = {"num_key_value_heads": groups}
    options |= {"lora_rank": rank, "lora_targets": ("all",)} if rank else {}
    block = Block(ModelSpec(**SIZES | options), rank).to(torch.bfloat16)
    block.cache = block.cache.float()
    if rank:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_("lora_" in name)
    tensors = predicted(LayerKind.BLOCK, options)
    assert tensors.saved_bytes == saved_by(block, inputs())
    assert peaks_of(block) == peaks_predicted(tensors)


@pytest.mark.slow
def test_weights_below_adapters_are_rounded_without_a_trace() -> None:
    """Autograd saves rounded weights for gradients of inputs, and of the rounding of inputs what it always saves."""
    form = FakeQuantization(weights="intx_int4", activations="int8", group_size=GROUP)
    options: dict[str, Any] = {"lora_rank": RANK, "lora_targets": ("all",)}
    block = Block(ModelSpec(**SIZES | options), RANK, rounds=True).to(torch.bfloat16)
    block.cache = block.cache.float()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("lora_" in name)
    tensors = predicted(LayerKind.BLOCK, options, form)
    assert tensors.saved_bytes == saved_by(block, inputs())
    scales = sum(tensor.elements for tensor in tensors.layer.attributes)
    assert peaks_of(block)[1] == pytest.approx(peaks_predicted(tensors)[1] + scales, rel=0.005)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_heads_save_and_peak_as_torch_does(trains: bool, chunked: bool) -> None:
    """The recipes' cross-entropy of all logits, and LinearCrossEntropyLoss; with a frozen head and a trained one."""
    vocab, n, h = SIZES["vocab_size"], SIZES["seq_len"], SIZES["hidden_size"]
    head = nn.Sequential(Norm(h), nn.Linear(h, vocab, bias=False)).to(torch.bfloat16).requires_grad_(trains)
    targets = torch.zeros(BATCH * n, dtype=torch.long)

    def run(x: Tensor) -> Tensor:
        if not chunked:
            logits = head(x).float()  # unembed, which frees what it copies
            return functional.cross_entropy(logits.reshape(-1, vocab), targets)
        total = torch.tensor(0.0)
        hidden = head[0](x).reshape(-1, h).tensor_split(CHUNKS)
        for part, target in zip(hidden, targets.tensor_split(CHUNKS), strict=True):
            logits = head[1](part)
            total = total + functional.cross_entropy(logits.float(), target, reduction="sum")
        return total

    options = {} if trains else {"lora_rank": RANK, "lora_targets": ("q",)}
    tensors = predicted(LayerKind.HEAD, options, loss="chunked" if chunked else "whole")
    assert tensors.saved_logits + tensors.saved_bytes == saved_by(head, inputs(), run=run)
    assert peaks_of(head, run) == pytest.approx(peaks_predicted(tensors), rel=0.005)  # and targets
