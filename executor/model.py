"""The modules of a model, built from its ModelSpec: same parameters, kernels and saved tensors as its LayerSpecs say.

A stage is a plain sequence of layers. The embedding takes tokens (batch, seq_len) int64, blocks take and give hidden
states (batch, seq_len, hidden_size), the head gives logits (batch, seq_len, vocab_size).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simplan.spec.layer import LayerKind
from simplan.spec.model import ModelSpec

__all__ = ["Stage", "build_layer", "build_stage", "cross_entropy"]

_EPS = 1e-5
_INIT_STD = 0.02  # GPT-2's
_ROTARY_BASE = 10_000.0  # RoPE, arXiv:2104.09864


class Stage(nn.Module):
    """Consecutive layers of a model.

    Attributes:
        layers: The modules, by the index of their LayerSpec (as text).
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers})

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layers in order."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def build_layer(spec: ModelSpec, layer_index: int) -> nn.Module:
    """The module of ``spec.layers[layer_index]``, in fp32 on the CPU, weights not yet drawn."""
    kind = spec.layers[layer_index].kind
    if kind is LayerKind.EMBEDDING:
        return _Embedding(spec)
    if kind is LayerKind.HEAD:
        return _Head(spec)
    return _GptBlock(spec) if spec.family == "gpt" else _LlamaBlock(spec)


def build_stage(
    spec: ModelSpec, layer_range: Iterable[int], dtype: torch.dtype, device: torch.device, seed: int
) -> Stage:
    """A stage with its weights, which depend on the seed and the layers' indices only, not on how layers are split.

    A tied output head shares the embedding's tensor when both are in the stage, else it holds an equal copy.
    """
    layers: dict[int, nn.Module] = {}
    for index in layer_range:
        layer = build_layer(spec, index)
        _draw_weights(layer, spec, index, seed)
        layers[index] = layer.to(device=device, dtype=dtype)
    blocks = [layer for layer in layers.values() if isinstance(layer, _LlamaBlock)]
    for block in blocks[1:]:  # one pair of tables per stage
        block.cos, block.sin = blocks[0].cos, blocks[0].sin
    embedding, head = layers.get(0), layers.get(len(spec.layers) - 1)
    if spec.tied_embeddings and isinstance(embedding, _Embedding) and isinstance(head, _Head):
        head.lm_head.weight = embedding.wte.weight
    return Stage(layers.items())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, computed in fp32 (in fp64 for fp64 logits).

    Args:
        logits: (batch, seq_len, vocab_size).
        targets: (batch, seq_len) int64.
    """
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, -2), targets.flatten())


def _draw_weights(layer: nn.Module, spec: ModelSpec, layer_index: int, seed: int) -> None:
    """Norms 1, biases 0, matrices normal(0, 0.02), each tensor from its own generator."""
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        source = (layer_index, number)
        if name == "lm_head.weight" and spec.tied_embeddings:
            source = (0, 0)  # the embedding's wte.weight
        with torch.no_grad():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed((seed * 100_003 + source[0]) * 101 + source[1])
                parameter.normal_(0.0, _INIT_STD, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


class _Embedding(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size) if spec.family == "gpt" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class _GptBlock(nn.Module):
    """Pre-norm GPT-2 block: LayerNorm, attention with one fused projection, LayerNorm, GELU MLP; biases throughout."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h, d = spec.hidden_size, spec.head_dim
        self._heads = (spec.num_attention_heads, spec.num_key_value_heads, spec.num_key_value_heads)
        self._widths = [heads * d for heads in self._heads]
        self.norm1 = nn.LayerNorm(h, eps=_EPS)
        self.qkv = nn.Linear(h, sum(self._widths))
        self.proj = nn.Linear(self._widths[0], h)
        self.norm2 = nn.LayerNorm(h, eps=_EPS)
        self.up = nn.Linear(h, spec.intermediate_size)
        self.down = nn.Linear(spec.intermediate_size, h)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).split(self._widths, dim=-1)
        q, k, v = (_split_heads(part, heads) for part, heads in zip(parts, self._heads, strict=True))
        x = x + self.proj(_attention(q, k, v))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class _LlamaBlock(nn.Module):
    """Pre-norm Llama block: RMSNorm, rotary grouped-query attention, RMSNorm, gated SiLU MLP; no biases."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h, d, i = spec.hidden_size, spec.head_dim, spec.intermediate_size
        self._heads, self._kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.norm1 = _RMSNorm(h)
        self.q = nn.Linear(h, self._heads * d, bias=False)
        self.k = nn.Linear(h, self._kv_heads * d, bias=False)
        self.v = nn.Linear(h, self._kv_heads * d, bias=False)
        self.proj = nn.Linear(self._heads * d, h, bias=False)
        self.norm2 = _RMSNorm(h)
        self.gate = nn.Linear(h, i, bias=False)
        self.up = nn.Linear(h, i, bias=False)
        self.down = nn.Linear(i, h, bias=False)
        cos, sin = _rotary_tables(spec.seq_len, d)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q = self._rotate(_split_heads(self.q(normed), self._heads))
        k = self._rotate(_split_heads(self.k(normed), self._kv_heads))
        v = _split_heads(self.v(normed), self._kv_heads)
        x = x + self.proj(_attention(q, k, v))
        normed = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotates the two halves of each head by an angle that grows with the position."""
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin


class _Head(nn.Module):
    """Final norm and output projection."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h = spec.hidden_size
        self.norm = nn.LayerNorm(h, eps=_EPS) if spec.family == "gpt" else _RMSNorm(h)
        self.lm_head = nn.Linear(h, spec.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class _RMSNorm(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return functional.rms_norm(x, self.weight.shape, self.weight, _EPS)
        out: Tensor = _LeanRMSNorm.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class _LeanRMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one number per row, as torch's CUDA kernel does.

    torch's own on the CPU is composed of single operations and keeps one tensor of the input's size more.
    With r = rsqrt(mean(x^2) + eps): y = x r w; dx = r (w dy - x r^2 mean(w dy x)); dw = sum of dy x r over rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPS)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        (grad,) = grad_outputs
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * weight
        mean = (grad_normed * normed).mean(dim=-1, keepdim=True)
        return (grad_normed - normed * mean) * scale, grad_weight


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(batch, seq_len, heads * head_dim) to (batch, heads, seq_len, head_dim), without a copy."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; (batch, heads, seq_len, head_dim) each, keys and values of fewer heads are shared by groups.

    Gives (batch, seq_len, heads * head_dim).
    """
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(-2)


def _rotary_tables(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, (seq_len, head_dim) each."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()
