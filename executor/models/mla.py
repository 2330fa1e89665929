"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention import RotaryPositions, split_heads
from executor.models.attention_cores import LayerRequest
from executor.models.blocks import Block, GatedMlp
from executor.models.ends import Embedding, Head
from executor.models.moe import ExpertMlp
from executor.models.norms import RMSNorm
from simplan.model.layer import LayerKind

__all__ = ["LAYERS", "LatentAttention", "deepseek_block"]


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys, values and optionally queries from latent vectors; values are padded to keys.

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


def deepseek_block(request: LayerRequest) -> nn.Module:
    """A block of family ``deepseek``: the first ones are dense."""
    spec, attention = request.spec, LatentAttention(request)
    dense = request.index - 1 < spec.num_dense_layers
    mlp = GatedMlp(spec.hidden_size, spec.intermediate_size) if dense else ExpertMlp(spec)
    return Block(spec, attention, mlp)


LAYERS = {LayerKind.EMBEDDING: Embedding, LayerKind.BLOCK: deepseek_block, LayerKind.HEAD: Head}
"""Module builders of the family's layers, by layer kind."""
