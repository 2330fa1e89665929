"""Self-attention modules: projections, norms and rotation of queries and keys, and the core with its communication.

Modules are built with unsharded matrices. When tensor-parallel ranks split the matrices
(``executor.distributed.tensor_parallel``), the same forward runs on a subset of the heads.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention_cores import LayerRequest
from executor.models.norms import RMSNorm
from simplan.model.parts.attention import Biases


class RotaryPositions(nn.Module):
    """Queries and keys are rotated by their positions.

    Args:
        width: Columns of each head that are rotated, the first ones.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, request: LayerRequest, width: int) -> None:
        super().__init__()
        cos, sin = request.stage.rotary_tables(width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotates (batch, heads, tokens, head_dim)."""
        width = self.cos.shape[-1]
        if width < x.shape[-1]:
            turned, rest = self(x[..., :width]), x[..., width:]
            # joined token by token: else heads would be one after the other, and so copied after the attention core
            return torch.cat((turned.transpose(1, 2), rest.transpose(1, 2)), dim=-1).transpose(1, 2)
        a, b = x.chunk(2, dim=-1)
        return (x * self.cos + torch.cat((-b, a), dim=-1) * self.sin).to(x.dtype)


class FusedAttention(nn.Module):
    """Attention with a fused QKV projection.

    Rows of the QKV matrix are grouped by key-value head: queries, keys and values of each group are adjacent, as in
    Megatron-LM and GPT-NeoX. Ranks can therefore split the matrix by rows.

    Args:
        bias: True when the QKV matrix and the output projection have biases.
        rotated: Columns per head with rotary embeddings; 0 for none.
    """

    def __init__(self, request: LayerRequest, *, bias: bool, rotated: int = 0) -> None:
        super().__init__()
        spec = request.spec
        heads, kv_heads, self._head_dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        self._of_group = [heads // kv_heads, 1, 1]
        self.qkv = nn.Linear(spec.hidden_size, (heads + 2 * kv_heads) * spec.head_dim, bias=bias)
        self.rotary = RotaryPositions(request, rotated) if rotated else None
        self.proj = nn.Linear(heads * spec.head_dim, spec.hidden_size, bias=bias)
        self._core = request.core

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, tokens, hidden_size) to hidden states of the same shape."""
        groups = torch.unflatten(self.qkv(x), -1, (-1, sum(self._of_group), self._head_dim))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in torch.split(groups, self._of_group, dim=3))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        out: Tensor = self.proj(self._core(q, k, v).transpose(1, 2).flatten(-2))
        return out


class SeparateAttention(nn.Module):
    """Attention with separate Q, K and V projections, optional norms of queries and keys, and optional rotation.

    Args:
        norms: RMSNorms of queries and keys: per head, or over all heads of the projection; None for no norms.
    """

    def __init__(
        self,
        request: LayerRequest,
        *,
        biases: Biases,
        rotary: bool = False,
        norms: Literal["head", "projection"] | None = None,
    ) -> None:
        super().__init__()
        spec = request.spec
        h, self._head_dim, self._norms = spec.hidden_size, spec.head_dim, norms
        q_width, kv_width = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q = nn.Linear(h, q_width, bias=biases != "none")
        self.k = nn.Linear(h, kv_width, bias=biases != "none")
        self.v = nn.Linear(h, kv_width, bias=biases != "none")
        if norms is not None:
            widths = (q_width, kv_width) if norms == "projection" else (spec.head_dim, spec.head_dim)
            self.q_norm, self.k_norm = map(RMSNorm, widths)
        self.rotary = RotaryPositions(request, spec.head_dim) if rotary else None
        self.proj = nn.Linear(q_width, h, bias=biases == "all")
        self._core = request.core

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, tokens, hidden_size) to hidden states of the same shape."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self._norms == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (split_heads(part, self._head_dim) for part in (q, k, v))
        if self._norms == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        out: Tensor = self.proj(self._core(q, k, v).transpose(1, 2).flatten(-2))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys, values and optionally queries from latent vectors.

    Values are padded to the width of keys.

    With tensor and sequence parallelism, ranks compute latent vectors of local tokens and all-gather those instead of
    the hidden states, as in ``simplan.model.parts.mla``.
    """

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        h, heads = spec.hidden_size, spec.num_attention_heads
        self._plain, self._rotated, self._value = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
        width = heads * (self._plain + self._rotated)
        self._compresses_queries = spec.q_lora_rank is not None
        if spec.q_lora_rank is None:
            self.q = nn.Linear(h, width, bias=False)
        else:
            self.q_a = nn.Linear(h, spec.q_lora_rank, bias=False)
            self.q_a_norm = RMSNorm(spec.q_lora_rank)
            self.q_b = nn.Linear(spec.q_lora_rank, width, bias=False)
        self.kv_a = nn.Linear(h, spec.kv_lora_rank + self._rotated, bias=False)
        self.kv_a_norm = RMSNorm(spec.kv_lora_rank)
        self.shared_key = nn.Identity()
        self.kv_b = nn.Linear(spec.kv_lora_rank, heads * (self._plain + self._value), bias=False)
        self.rotary = RotaryPositions(request, self._rotated)
        self.proj = nn.Linear(heads * self._value, h, bias=False)
        self._core = request.core

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, tokens, hidden_size) to hidden states of the same shape."""
        queries = self.q_b(self.q_a_norm(self.q_a(x))) if self._compresses_queries else self.q(x)
        q_plain, q_rotated = self._parts(split_heads(queries, self._plain + self._rotated), self._rotated)
        latent, k_rotated = self._parts(self.kv_a(x), self._rotated)
        latent = self.kv_a_norm(latent)
        k_rotated = self.shared_key(k_rotated)  # of all heads
        keys_and_values = split_heads(self.kv_b(latent), self._plain + self._value)
        k_plain, v = self._parts(keys_and_values, self._value)
        q = torch.cat((q_plain, self.rotary(q_rotated)), -1)
        shared = self.rotary(split_heads(k_rotated, self._rotated)).expand(-1, k_plain.shape[1], -1, -1)
        k = torch.cat((k_plain, shared), -1)
        v = functional.pad(v, (0, q.shape[-1] - self._value))
        attended = self._core(q, k, v)[..., : self._value]
        out: Tensor = self.proj(attended.transpose(1, 2).flatten(-2))
        return out

    @staticmethod
    def _parts(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Splits off the last columns: all others, and the last ones."""
        return x[..., :-last], x[..., -last:]


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(batch, tokens, heads * head_dim) to (batch, heads, tokens, head_dim), without a copy."""
    return torch.unflatten(x, -1, (-1, head_dim)).transpose(1, 2)
