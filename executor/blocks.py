"""The transformer blocks, whole or as one tensor- and context-parallel rank has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.context_parallel import ContextAttention
from executor.norms import make_norm
from executor.parallel import Parallel
from executor.tensor_parallel import column_linear, row_linear
from simplan.spec.model import ModelSpec

__all__ = ["GptBlock", "LlamaBlock"]

_ROTARY_BASE = 10_000.0  # RoPE, arXiv:2104.09864


class Block(nn.Module):
    """A pre-norm block: attention, then an MLP, each added to its input.

    Args:
        spec: The model.
        parallel: How its layers are split.
        attention: Attention over all tokens.
        recompute: Keep only the input, and run forward again in backward.
    """

    def __init__(self, spec: ModelSpec, parallel: Parallel, attention: ContextAttention, *, recompute: bool) -> None:
        super().__init__()
        self._parallel, self._attention, self._recompute = parallel, attention, recompute
        self._heads = spec.num_attention_heads // parallel.shard.tp
        self._kv_heads = spec.num_key_value_heads // parallel.shard.tp

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, own tokens, hidden_size) to hidden states."""
        if not self._recompute:
            return self._block(x)
        # inside of the module, so that FSDP's hooks run once around forward and once around backward
        out: Tensor = checkpoint(self._block, x, use_reentrant=False, preserve_rng_state=False)
        return out

    def _block(self, x: Tensor) -> Tensor:
        x = x + self._self_attention(x)
        return x + self._mlp(x)

    def _self_attention(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _mlp(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim) each to (batch, tokens, heads * head_dim)."""
        return self._attention(q, k, v).transpose(1, 2).flatten(-2)


class GptBlock(Block):
    """GPT-2's: LayerNorm, attention with one fused projection, LayerNorm, GELU MLP; biases throughout."""

    def __init__(self, spec: ModelSpec, parallel: Parallel, attention: ContextAttention, *, recompute: bool) -> None:
        super().__init__(spec, parallel, attention, recompute=recompute)
        h, i = spec.hidden_size, spec.intermediate_size // parallel.shard.tp
        self._head_counts = (self._heads, self._kv_heads, self._kv_heads)
        self._widths = [heads * spec.head_dim for heads in self._head_counts]
        self.norm1 = make_norm(spec)
        self.qkv = nn.Linear(h, sum(self._widths))
        self.proj = nn.Linear(self._widths[0], h)
        self.norm2 = make_norm(spec)
        self.up = nn.Linear(h, i)
        self.down = nn.Linear(i, h)

    def _self_attention(self, x: Tensor) -> Tensor:
        (qkv,) = column_linear(self.norm1(x), [self.qkv], self._parallel)
        parts = zip(torch.split(qkv, self._widths, dim=-1), self._head_counts, strict=True)
        q, k, v = (_split_heads(part, heads) for part, heads in parts)
        return row_linear(self._attend(q, k, v), self.proj, self._parallel)

    def _mlp(self, x: Tensor) -> Tensor:
        (up,) = column_linear(self.norm2(x), [self.up], self._parallel)
        return row_linear(functional.gelu(up), self.down, self._parallel)


class LlamaBlock(Block):
    """Llama's: RMSNorm, rotary grouped-query attention, RMSNorm, gated SiLU MLP; no biases."""

    def __init__(self, spec: ModelSpec, parallel: Parallel, attention: ContextAttention, *, recompute: bool) -> None:
        super().__init__(spec, parallel, attention, recompute=recompute)
        h, d, i = spec.hidden_size, spec.head_dim, spec.intermediate_size // parallel.shard.tp
        self.norm1 = make_norm(spec)
        self.q = nn.Linear(h, self._heads * d, bias=False)
        self.k = nn.Linear(h, self._kv_heads * d, bias=False)
        self.v = nn.Linear(h, self._kv_heads * d, bias=False)
        self.proj = nn.Linear(self._heads * d, h, bias=False)
        self.norm2 = make_norm(spec)
        self.gate = nn.Linear(h, i, bias=False)
        self.up = nn.Linear(h, i, bias=False)
        self.down = nn.Linear(i, h, bias=False)
        cos, sin = _rotary_tables(parallel.positions(spec.seq_len), d)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _self_attention(self, x: Tensor) -> Tensor:
        q, k, v = column_linear(self.norm1(x), [self.q, self.k, self.v], self._parallel)
        rotated_q = self._rotate(_split_heads(q, self._heads))
        rotated_k = self._rotate(_split_heads(k, self._kv_heads))
        attended = self._attend(rotated_q, rotated_k, _split_heads(v, self._kv_heads))
        return row_linear(attended, self.proj, self._parallel)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = column_linear(self.norm2(x), [self.gate, self.up], self._parallel)
        return row_linear(functional.silu(gate) * up, self.down, self._parallel)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotates the two halves of each head by an angle that grows with the position."""
        a, b = x.chunk(2, dim=-1)
        return (x * self.cos + torch.cat((-b, a), dim=-1) * self.sin).to(x.dtype)


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(batch, tokens, heads * head_dim) to (batch, heads, tokens, head_dim), without a copy."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def _rotary_tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, (tokens, head_dim) each."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(positions.double(), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()
