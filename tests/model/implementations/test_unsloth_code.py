"""Layers of Unsloth against its autograd functions, written with torch's kernels in place of Triton's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplan
from executor.dry_run.memory_tracker import StorageTracker
from simplan import catalog
from simplan.errors import NotModelledError
from simplan.model.base_weights import BaseWeights
from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec
from simplan.model.recompute import Recomputation
from simplan.plan.plan import ParallelPlan
from simplan.program.memory.liveness import Points, backward_points, forward_points
from simplan.program.memory.tensors import LayerTensors
from simplan.training import TrainingSpec
from tests.model.implementations.test_litgpt_code import Attend, saved_by
from tests.support.slow import slow_except

UNSLOTH = catalog.software("unsloth")
SIZES: dict[str, Any] = {
    "family": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8,
    "vocab_size": 320, "seq_len": 256, "tied_embeddings": False, "lora_rank": 4, "lora_targets": ("all",),
}  # fmt: skip
BATCH, RANK = 2, 4


class Norm(torch.autograd.Function):
    """kernels/rms_layernorm.py, Fast_RMS_Layernorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, w, torch.empty(len(flat), dtype=torch.float32))
        return torch.empty_like(flat).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class Rotate(torch.autograd.Function):
    """kernels/rope_embedding.py, Fast_RoPE_Embedding: queries or keys, and gradients, in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return q.view(q.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def with_adapter(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """kernels/utils.py, matmul_lora."""
    out = x @ w.t()
    return out.addmm_(x @ a.t(), b.t(), alpha=2.0)


def gradients(x: Tensor, dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of A and B in fast_lora.py."""
    d_a, d_b = torch.empty_like(a.t()), torch.empty_like(b.t())
    d_a.addmm_(x.t(), dy @ b, alpha=2.0, beta=0)
    d_b.addmm_(a @ x.t(), dy, alpha=2.0, beta=0)
    return d_a.t(), d_b.t()


class QKV(torch.autograd.Function):
    """kernels/fast_lora.py, LoRA_QKV."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        flat = x.view(-1, x.shape[-1])
        ctx.own = weights[::3]
        ctx.save_for_backward(x, *(w for i, w in enumerate(weights) if i % 3))
        parts = zip(weights[::3], weights[1::3], weights[2::3], strict=True)
        return tuple(with_adapter(flat, *part).view(*x.shape[:2], -1) for part in parts)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *adapters = ctx.saved_tensors
        flat, grads = x.view(-1, x.shape[-1]), []
        flows = [d.reshape(-1, d.shape[-1]) for d in dy]
        for d, a, b in zip(flows, adapters[::2], adapters[1::2], strict=True):
            grads += [None, *gradients(flat, d, a, b)]
        dx = torch.matmul(flows[0], ctx.own[0], out=flat)
        for number, (d, a, b) in enumerate(zip(flows, adapters[::2], adapters[1::2], strict=True)):
            if number:
                dx.addmm_(d, ctx.own[number])
            dx.addmm_(d @ b, a, alpha=2.0)
        return (dx.view(x.shape), *grads)


class One(torch.autograd.Function):
    """kernels/fast_lora.py, LoRA_W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.own = w
        ctx.save_for_backward(a, b, x)
        return with_adapter(x.view(-1, x.shape[-1]), w, a, b).view(*x.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, x = ctx.saved_tensors
        d, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        grads = gradients(flat, d, a, b)
        dx = d @ ctx.own
        dx.addmm_(d @ b, a, alpha=2.0)
        return (dx.view(x.shape), None, *grads)


class MLP(torch.autograd.Function):
    """kernels/fast_lora.py, LoRA_MLP with kernels/swiglu.py, which writes over what it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        parts = [weights[i : i + 3] for i in (0, 3, 6)]
        e, g = with_adapter(flat, *parts[0]), with_adapter(flat, *parts[1])
        h = torch.empty_like(e)
        i = with_adapter(h, *parts[2])
        ctx.own = weights[::3]
        ctx.save_for_backward(*(w for n, w in enumerate(weights) if n % 3), x, e, g)
        return i.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_a, gate_b, up_a, up_b, down_a, down_b, x, e, g = ctx.saved_tensors
        gate, up, down = ctx.own
        d, flat = dy.view(-1, dy.shape[-1]), x.view(-1, x.shape[-1])
        h = with_adapter(d, down.t(), down_b.t(), down_a.t())
        df, de = e, g
        grads = [None, *gradients(flat, de, gate_a, gate_b), None, *gradients(flat, df, up_a, up_b)]
        grads += [None, *gradients(h, d, down_a, down_b)]
        dx = torch.matmul(df, up, out=flat)
        dx.addmm_(df @ up_b, up_a, alpha=2.0)
        dx.addmm_(de, gate)
        dx.addmm_(de @ gate_b, gate_a, alpha=2.0)
        return (dx.view(x.shape), *grads)


class Block(nn.Module):
    """models/llama.py, LlamaDecoderLayer_fast_forward with LlamaAttention_fast_forward."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h, kv, width = spec.hidden_size, spec.num_key_value_heads * spec.head_dim, spec.intermediate_size
        self.size = spec.head_dim
        self.norms = nn.ParameterList(torch.ones(h) for _ in range(2))
        shapes = [(h, h), (kv, h), (kv, h), (h, h), (width, h), (width, h), (h, width)]
        sizes = [s for n, k in shapes for s in ((n, k), (RANK, k), (n, RANK))]
        self.weights = nn.ParameterList(torch.ones(shape) for shape in sizes)
        self.to(torch.bfloat16).requires_grad_(False)
        for number, weight in enumerate(self.weights):
            weight.requires_grad_(number % 3 > 0)

    def forward(self, x: Tensor) -> Tensor:
        (b, s, _), weights = x.shape, [*self.weights]
        flows = QKV.apply(Norm.apply(x, self.norms[0]), *weights[:9])  # type: ignore[no-untyped-call]
        q, k, v = (flow.view(b, s, -1, self.size) for flow in flows)
        q, k = (Rotate.apply(heads).transpose(1, 2) for heads in (q, k))  # type: ignore[no-untyped-call]
        attended = Attend.apply(q, k, v.transpose(1, 2))  # type: ignore[no-untyped-call]
        x = x + One.apply(attended.transpose(1, 2).reshape(b, s, -1), *weights[9:12])  # type: ignore[no-untyped-call]
        result: Tensor = x + MLP.apply(Norm.apply(x, self.norms[1]), *weights[12:])  # type: ignore[no-untyped-call]
        return result


def predicted(kind: LayerKind, base: BaseWeights | None = None, **options: Any) -> LayerTensors:
    """Tensors of the last layer of a kind."""
    spec, plan = ModelSpec(**SIZES | options), ParallelPlan(microbatch_size=BATCH)
    training = TrainingSpec(global_batch_size=BATCH, precision="bf16", task="lora", base_weights=base)
    layer = [candidate for candidate in UNSLOTH.layers_of(spec, plan, training) if candidate.kind is kind][-1]
    saved = Recomputation(frozenset(tensor.name for tensor in layer.saved))
    return LayerTensors(layer, BATCH, UNSLOTH.state(training, plan), saved)


@pytest.mark.parametrize("groups", slow_except([2], [2, 8]))
def test_blocks_save_and_peak_as_unsloths_functions(groups: int) -> None:
    options: dict[str, Any] = {"num_key_value_heads": groups}
    block, tracker = Block(ModelSpec(**SIZES | options)), StorageTracker()
    x = torch.ones(BATCH, SIZES["seq_len"], SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    tensors = predicted(LayerKind.BLOCK, **options)
    statistics = 2 * BATCH * SIZES["seq_len"] * 4  # of norms
    assert tensors.saved_bytes - tensors.input_bytes == saved_by(block, x) + statistics
    tensors_alive = [*block.parameters(), x]
    with tracker.counting():
        known = [tensor.detach() for tensor in tensors_alive[:-1]]
        before = tracker.total_bytes
        assert known
        tensors_alive[-1].detach()
        result = block(x)
        forward = tracker.peak_bytes - before
        tracker.peak_bytes = tracker.total_bytes
        result.backward(torch.ones_like(result))
    backward = tracker.peak_bytes - before - result.nbytes

    def largest(points: Points) -> int:
        return max(tensors.saved_bytes + p.workspace for _, p in points)

    points = largest(forward_points(tensors)), largest(backward_points(tensors))
    assert points == pytest.approx((forward, backward), rel=0.007)  # and gradients of adapters


def test_weights_are_unpacked_into_one_buffer_in_forward_alone() -> None:
    """kernels/utils.py, fast_dequantize: the largest matrix and its scales stay, and backward allocates for itself."""
    h, width = SIZES["hidden_size"], SIZES["intermediate_size"]
    tensors = predicted(LayerKind.BLOCK, BaseWeights(format="nf4", double_quantization=True))
    num_weights = h * width
    named = {table.name: table.num_bytes(2, 2) for table in tensors.layer.constants}
    assert (named["unpacked weight"], named["its scales"]) == (2 * num_weights, 4 * num_weights // 64)
    down = next(o for o in tensors.layer.operators if o.kernel is not None and o.kernel.name == "down")
    assert tensors.scratch_bytes(down, forward=True) == 0
    assert tensors.scratch_bytes(down, forward=False) >= 2 * num_weights


def test_other_jobs_are_not_modeled() -> None:
    """Full fine-tuning runs other modules, and 8-bit matrices other kernels (models/vision.py, kernels/utils.py)."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"task": "sft"}, "task = sft: Unsloth's training of all weights"),
        ({"task": "lora", "lora_rank": 8, "training.base_weights": {"format": "int8"}}, "int8 with Unsloth's kernels"),
        ({"task": "lora", "lora_rank": 8, "model": "gemma-7b"}, "Unsloth's code for this family"),
    ]
    for options, sentence in cases:
        model = options.pop("model", "llama3-8b")
        usual = {"software": "unsloth", "device": "h100-sxm", "num_devices": 1, "global_batch_size": 1, "seq_len": 128}
        with pytest.raises(NotModelledError, match=sentence):
            simplan.predict(model, usual | options)


@pytest.mark.parametrize(("tokens", "vocab"), [(4096, 128256), (16384, 128256), (65536, 151936), (2048, 32000)])
def test_a_loss_has_one_chunk_or_fours_of_them(tokens: int, vocab: int) -> None:
    """unsloth_zoo/fused_losses/cross_entropy_loss.py, get_chunk_size with a target of 4 GiB."""
    exact = tokens * vocab * 4 / 2**30 / 4
    number = 1 if exact <= 1 + 1e-9 else 4 * math.ceil(exact / 4 - 1e-9)
    head = predicted(LayerKind.HEAD, seq_len=tokens, vocab_size=vocab)
    assert head.layer.loss_chunks is not None
    assert head.layer.loss_chunks.tokens(1) == -(-tokens // number)
    h = SIZES["hidden_size"]
    assert head.saved_bytes == BATCH * tokens * (2 * h + 2 * h + 4)  # input, its gradient, statistics
