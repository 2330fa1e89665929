"""The transformer blocks of each family, whole or as one tensor- and context-parallel rank has them.

A block is put together from an attention and an MLP, as its LayerSpec is. Its parameters are its own, without a level
of names for its parts, so that they are called what the LayerSpec calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.distributed.mesh import ParallelDims
from executor.distributed.recompute import Around, BlockRecompute, run_block
from executor.distributed.tensor_parallel import column_linear, row_linear
from executor.models.attention_cores import Attentions
from executor.models.norms import RMSNorm, make_norm
from executor.train.documents import token_positions
from simplan.spec.model import ModelSpec
from simplan.spec.models.attention import Biases

__all__ = [
    "BertBlock",
    "Block",
    "Gemma2Block",
    "GptBlock",
    "LayerRequest",
    "LlamaBlock",
    "MptBlock",
    "NeoxBlock",
    "Rotary",
    "RotaryAttention",
    "split_heads",
]

_ROTARY_BASE = 10_000.0  # RoPE, arXiv:2104.09864


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """Which layer is wanted.

    Attributes:
        spec: The model.
        index: Of the layer in ``spec.layers``.
        parallel: Which part of it this rank has.
        attentions: Those of its stage.
        recompute: What of it runs again in backward.
        around_rerun: Is entered around that.
    """

    spec: ModelSpec
    index: int
    parallel: ParallelDims
    attentions: Attentions
    recompute: BlockRecompute
    around_rerun: Around = nullcontext


class Block(nn.Module, ABC):
    """A block: attention, then an MLP, each added to the residual stream.

    Attributes:
        post_norm: Each sum is normed, not what attention and MLP are applied to.
    """

    post_norm: ClassVar[bool] = False

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec, self._parallel = request.spec, request.parallel
        self._recompute, self._around_rerun = request.recompute, request.around_rerun
        self._attention = request.attentions.of_block(spec.block_indices().index(request.index))
        self._router_shape = (spec.hidden_size, spec.num_experts) if spec.num_experts else None
        self._heads = spec.num_attention_heads // self._parallel.shard.tp
        self._kv_heads = spec.num_key_value_heads // self._parallel.shard.tp
        self._make(spec)

    def _make(self, spec: ModelSpec) -> None:
        """The weights, in the order in which forward uses them."""
        if self.post_norm:
            self._make_attention(spec)
            self.norm1 = make_norm(spec)
            self._make_mlp(spec)
            self.norm2 = make_norm(spec)
        else:
            self.norm1 = make_norm(spec)
            self._make_attention(spec)
            self.norm2 = make_norm(spec)
            self._make_mlp(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, own tokens, hidden_size) to hidden states."""
        recompute, around = self._recompute, self._around_rerun
        return run_block(self._block, x, recompute=recompute, around=around, uncounted=self._router_shape)

    def _block(self, x: Tensor) -> Tensor:
        x = x + self._self_attention(x)
        if self.post_norm:
            x = self.norm1(x)
        x = x + self._mlp(x)
        return self.norm2(x) if self.post_norm else x

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """What attention or MLP is applied to."""
        normed: Tensor = x if self.post_norm else norm(x)
        return normed

    @property
    def _norm_of_mlp(self) -> nn.Module:
        return self.norm2

    @abstractmethod
    def _make_attention(self, spec: ModelSpec) -> None: ...

    @abstractmethod
    def _self_attention(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _make_mlp(self, spec: ModelSpec) -> None: ...

    @abstractmethod
    def _mlp(self, x: Tensor) -> Tensor: ...

    def _make_position(self, spec: ModelSpec) -> None:
        """What is done to queries and keys has weights or tables."""

    def _positioned(self, x: Tensor, name: str) -> Tensor:
        """What is done to queries or keys (batch, heads, tokens, head_dim)."""
        del name
        return x

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim) each to (batch, tokens, heads * head_dim)."""
        return self._attention(q, k, v).transpose(1, 2).flatten(-2)


class FusedAttention(Block):
    """q, k and v by one matrix."""

    bias: ClassVar[bool] = True

    def _make_attention(self, spec: ModelSpec) -> None:
        self._head_counts = (self._heads, self._kv_heads, self._kv_heads)
        self._widths = [heads * spec.head_dim for heads in self._head_counts]
        self.qkv = nn.Linear(spec.hidden_size, sum(self._widths), bias=self.bias)
        self._make_position(spec)
        self.proj = nn.Linear(self._widths[0], spec.hidden_size, bias=self.bias)

    def _self_attention(self, x: Tensor) -> Tensor:
        (qkv,) = column_linear(self._normed(x, self.norm1), [self.qkv], self._parallel)
        parts = zip(torch.split(qkv, self._widths, dim=-1), self._head_counts, strict=True)
        q, k, v = (split_heads(part, heads) for part, heads in parts)
        return row_linear(
            self._attend(self._positioned(q, "q"), self._positioned(k, "k"), v), self.proj, self._parallel
        )


class SeparateAttention(Block):
    """q, k and v by three matrices."""

    def _make_attention(self, spec: ModelSpec) -> None:
        h, d, bias = spec.hidden_size, spec.head_dim, self._biases(spec)
        self.q = nn.Linear(h, self._heads * d, bias=bias != "none")
        self.k = nn.Linear(h, self._kv_heads * d, bias=bias != "none")
        self.v = nn.Linear(h, self._kv_heads * d, bias=bias != "none")
        self._make_position(spec)
        self.proj = nn.Linear(self._heads * d, h, bias=bias == "all")

    def _self_attention(self, x: Tensor) -> Tensor:
        q, k, v = column_linear(self._normed(x, self.norm1), [self.q, self.k, self.v], self._parallel)
        q, k = self._projected(q, k)
        q, k, v = split_heads(q, self._heads), split_heads(k, self._kv_heads), split_heads(v, self._kv_heads)
        return row_linear(
            self._attend(self._positioned(q, "q"), self._positioned(k, "k"), v), self.proj, self._parallel
        )

    def _biases(self, spec: ModelSpec) -> Biases:
        del spec
        return "all"

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What is done to queries and keys of all heads (batch, tokens, heads * head_dim)."""
        return q, k


class Rotary(Block):
    """Has tables for rotating queries and keys by their positions."""

    def _make_tables(self, spec: ModelSpec, width: int) -> None:
        cos, sin = _rotary_tables(token_positions(spec, self._parallel), width)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotates the two halves of the first columns of each head by an angle that grows with the position."""
        width = self.cos.shape[-1]
        if width < x.shape[-1]:
            turned, rest = self._rotate(x[..., :width]), x[..., width:]
            # joined token by token: else heads would be one after the other, and so copied after the attention core
            return torch.cat((turned.transpose(1, 2), rest.transpose(1, 2)), dim=-1).transpose(1, 2)
        a, b = x.chunk(2, dim=-1)
        return (x * self.cos + torch.cat((-b, a), dim=-1) * self.sin).to(x.dtype)


class RotaryAttention(SeparateAttention, Rotary):
    """Queries and keys are perhaps normed, then rotated by their positions."""

    def _biases(self, spec: ModelSpec) -> Biases:
        return "all" if spec.attention_bias else "qkv" if spec.qkv_bias else "none"

    def _make_position(self, spec: ModelSpec) -> None:
        self._norms_heads, self._norms_projections = spec.qk_norm == "head", spec.qk_norm == "projection"
        if self._norms_heads:
            self.q_norm, self.k_norm = RMSNorm(spec.head_dim), RMSNorm(spec.head_dim)
        elif self._norms_projections:
            self.q_norm, self.k_norm = (RMSNorm(heads * spec.head_dim) for heads in (self._heads, self._kv_heads))
        self._make_tables(spec, spec.head_dim)

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (self.q_norm(q), self.k_norm(k)) if self._norms_projections else (q, k)

    def _positioned(self, x: Tensor, name: str) -> Tensor:
        if self._norms_heads:
            x = self.q_norm(x) if name == "q" else self.k_norm(x)
        return self._rotate(x)


class GeluMlp(Block):
    """Up, GELU, down."""

    bias: ClassVar[bool] = True

    def _make_mlp(self, spec: ModelSpec) -> None:
        h, i = spec.hidden_size, spec.intermediate_size // self._parallel.shard.tp
        self.up = nn.Linear(h, i, bias=self.bias)
        self.down = nn.Linear(i, h, bias=self.bias)

    def _mlp(self, x: Tensor) -> Tensor:
        (up,) = column_linear(self._normed(x, self._norm_of_mlp), [self.up], self._parallel)
        return row_linear(functional.gelu(up), self.down, self._parallel)


class GatedMlp(Block):
    """Gate and up, a function of the one times the other, down."""

    activation: ClassVar[Callable[[Tensor], Tensor]] = functional.silu

    def _make_mlp(self, spec: ModelSpec) -> None:
        h, i = spec.hidden_size, spec.intermediate_size // self._parallel.shard.tp
        self.gate = nn.Linear(h, i, bias=False)
        self.up = nn.Linear(h, i, bias=False)
        self.down = nn.Linear(i, h, bias=False)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = column_linear(self._normed(x, self._norm_of_mlp), [self.gate, self.up], self._parallel)
        return row_linear(type(self).activation(gate) * up, self.down, self._parallel)


class GptBlock(FusedAttention, GeluMlp):
    """GPT-2's: LayerNorm, attention with one fused projection, LayerNorm, GELU MLP; biases throughout. ViT's, too."""


class MptBlock(FusedAttention, GeluMlp):
    """The same without any biases."""

    bias = False


class BertBlock(SeparateAttention, GeluMlp):
    """BERT's: attention and MLP with biases, each sum normed; queries, keys and values by three matrices."""

    post_norm = True


class NeoxBlock(FusedAttention, GeluMlp, Rotary):
    """GPT-NeoX's: attention and MLP of the same hidden states, each after a LayerNorm of its own."""

    def _make_position(self, spec: ModelSpec) -> None:
        self._make_tables(spec, round(spec.partial_rotary_factor * spec.head_dim))

    def _positioned(self, x: Tensor, name: str) -> Tensor:
        del name
        return self._rotate(x)

    def _block(self, x: Tensor) -> Tensor:
        attended = self._self_attention(x)
        return torch.add(x, self._mlp(x) + attended)


class Gemma2Block(RotaryAttention, GatedMlp):
    """Gemma 2's: norms before and after attention and MLP; scores under a scaled tanh are its attention core's."""

    activation = partial(functional.gelu, approximate="tanh")

    def _make(self, spec: ModelSpec) -> None:
        self.norm1 = make_norm(spec)
        self._make_attention(spec)
        self.norm2, self.norm3 = make_norm(spec), make_norm(spec)
        self._make_mlp(spec)
        self.norm4 = make_norm(spec)

    @property
    def _norm_of_mlp(self) -> nn.Module:
        return self.norm3

    def _block(self, x: Tensor) -> Tensor:
        x = x + self.norm2(self._self_attention(x))
        return torch.add(x, self.norm4(self._mlp(x)))


class LlamaBlock(RotaryAttention, GatedMlp):
    """Llama's: RMSNorm, rotary grouped-query attention, RMSNorm, gated SiLU MLP."""


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(batch, tokens, heads * head_dim) to (batch, heads, tokens, head_dim), without a copy."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def _rotary_tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, (tokens, head_dim) each."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(positions.double(), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()
