"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.distributed.tensor_parallel import column_linear, compute_dtype, for_columns, row_linear
from executor.models.blocks import GatedMlp, LayerRequest, Rotary, split_heads
from executor.models.ends import Embedding, Head
from executor.models.moe import ExpertMlp
from executor.models.norms import RMSNorm
from simplan.spec.layer import LayerKind
from simplan.spec.model import ModelSpec

__all__ = ["LAYERS", "LatentAttention", "LatentDenseBlock", "LatentMoeBlock", "deepseek_block"]


class LatentAttention(Rotary):
    """Keys and values of all heads, perhaps queries too, from narrow vectors; values are padded to the keys' width.

    Tensor-parallel ranks have some of the heads each. With sequence parallelism they make narrow vectors of the own
    tokens and gather these, not the hidden states, as ``simplan.spec.models.mla`` says.
    """

    def _make_attention(self, spec: ModelSpec) -> None:
        h, heads = spec.hidden_size, self._heads
        self._plain, self._rotated, self._value = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
        self._latent = spec.kv_lora_rank
        width = heads * (self._plain + self._rotated)
        if spec.q_lora_rank is None:
            self.q = nn.Linear(h, width, bias=False)
        else:
            self.q_a = nn.Linear(h, spec.q_lora_rank, bias=False)
            self.q_a_norm = RMSNorm(spec.q_lora_rank)
            self.q_b = nn.Linear(spec.q_lora_rank, width, bias=False)
        self._compresses_queries = spec.q_lora_rank is not None
        self.kv_a = nn.Linear(h, self._latent + self._rotated, bias=False)
        self.kv_a_norm = RMSNorm(self._latent)
        self.kv_b = nn.Linear(self._latent, heads * (self._plain + self._value), bias=False)
        self._make_tables(spec, self._rotated)
        self.proj = nn.Linear(heads * self._value, h, bias=False)

    def _self_attention(self, x: Tensor) -> Tensor:
        x = compute_dtype(self._normed(x, self.norm1))
        if self._compresses_queries:
            (queries,) = column_linear(self.q_a_norm(self.q_a(x)), [self.q_b], self._parallel)
        else:
            (queries,) = column_linear(x, [self.q], self._parallel)
        q_plain, q_rotated = self._parts(split_heads(queries, self._heads), self._rotated)
        latent, k_rotated = self._parts(self.kv_a(x), self._rotated)
        latent = self.kv_a_norm(latent)
        k_rotated = for_columns(k_rotated, self._parallel)
        (keys_and_values,) = column_linear(latent, [self.kv_b], self._parallel)
        k_plain, v = self._parts(split_heads(keys_and_values, self._heads), self._value)
        q = torch.cat((q_plain, self._rotate(q_rotated)), -1)
        shared = self._rotate(split_heads(k_rotated, 1)).expand(-1, self._heads, -1, -1)
        k = torch.cat((k_plain, shared), -1)
        v = functional.pad(v, (0, q.shape[-1] - self._value))
        out = self._attention(q, k, v)[..., : self._value]
        return row_linear(out.transpose(1, 2).flatten(-2), self.proj, self._parallel)

    @staticmethod
    def _parts(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """All but the last columns, and these."""
        return x[..., :-last], x[..., -last:]


class LatentDenseBlock(LatentAttention, GatedMlp):
    """With Llama's MLP."""


class LatentMoeBlock(LatentAttention, ExpertMlp):
    """With experts."""


def deepseek_block(request: LayerRequest) -> nn.Module:
    """A block of family ``deepseek``: the first ones are dense."""
    dense = request.index - 1 < request.spec.num_dense_layers
    return LatentDenseBlock(request) if dense else LatentMoeBlock(request)


LAYERS = {LayerKind.EMBEDDING: Embedding, LayerKind.BLOCK: deepseek_block, LayerKind.HEAD: Head}
"""What runs the layers of the family, by their kind."""
