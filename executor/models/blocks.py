"""Transformer blocks: attention and an MLP, each added to the residual stream, in the order of each family.

Hidden states are (batch, tokens, hidden_size). Under autocast, what several matrices are applied to is cast once
(``as_matmul_dtype``). A block's parameters are registered in the order in which forward uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention import FusedAttention, SeparateAttention
from executor.models.attention_cores import LayerRequest
from executor.models.norms import as_matmul_dtype, make_norm
from simplan.model.model import ModelSpec
from simplan.model.parts.attention import Biases


class GeluMlp(nn.Module):
    """Up, GELU, down."""

    def __init__(self, spec: ModelSpec, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=bias)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, tokens, hidden_size) to hidden states of the same shape."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class GatedMlp(nn.Module):
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: Callable[[Tensor], Tensor] = functional.silu
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, tokens, hidden_size) to hidden states of the same shape."""
        gate, up = self.gate(x), self.up(x)
        out: Tensor = self.down(self._activation(gate) * up)
        return out


class Block(nn.Module):
    """Pre-norm block as in GPT-2 and Llama: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        attention, mlp: Modules applied to normed hidden states.
    """

    def __init__(self, spec: ModelSpec, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = make_norm(spec)
        self.attention = attention
        self.norm2 = make_norm(spec)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        x = x + self.attention(as_matmul_dtype(self.norm1(x)))
        return torch.add(x, self.mlp(as_matmul_dtype(self.norm2(x))))


class PostNormBlock(nn.Module):
    """Each sum is normed (BERT, and the first transformer); arguments as of ``Block``."""

    def __init__(self, spec: ModelSpec, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm1 = make_norm(spec)
        self.mlp = mlp
        self.norm2 = make_norm(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        x = self.norm1(x + self.attention(as_matmul_dtype(x)))
        out: Tensor = self.norm2(x + self.mlp(as_matmul_dtype(x)))
        return out


class ParallelBlock(Block):
    """Parallel block: attention and MLP of the same hidden states, each after a separate norm (GPT-NeoX)."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        attended = self.attention(as_matmul_dtype(self.norm1(x)))
        return torch.add(x, self.mlp(as_matmul_dtype(self.norm2(x))) + attended)


class SandwichBlock(nn.Module):
    """Norms before and after attention and MLP (Gemma 2 and 3); arguments as of ``Block``."""

    def __init__(self, spec: ModelSpec, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = make_norm(spec)
        self.attention = attention
        self.norm2 = make_norm(spec)
        self.norm3 = make_norm(spec)
        self.mlp = mlp
        self.norm4 = make_norm(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        x = x + self.norm2(self.attention(as_matmul_dtype(self.norm1(x))))
        return torch.add(x, self.norm4(self.mlp(as_matmul_dtype(self.norm3(x)))))


def gpt_block(request: LayerRequest) -> nn.Module:
    """GPT-2's: LayerNorm, attention with one fused projection, LayerNorm, GELU MLP; biases throughout. ViT's, too."""
    return Block(request.spec, FusedAttention(request, bias=True), GeluMlp(request.spec, bias=True))


def mpt_block(request: LayerRequest) -> nn.Module:
    """MPT's block: GPT-2's without biases."""
    return Block(request.spec, FusedAttention(request, bias=False), GeluMlp(request.spec, bias=False))


def bert_block(request: LayerRequest) -> nn.Module:
    """BERT's: biases throughout, queries, keys and values by three matrices."""
    return PostNormBlock(request.spec, SeparateAttention(request, biases="all"), GeluMlp(request.spec, bias=True))


def neox_block(request: LayerRequest) -> nn.Module:
    """GPT-NeoX's: a part of each head is rotated."""
    spec = request.spec
    rotated = round(spec.partial_rotary_factor * spec.head_dim)
    return ParallelBlock(spec, FusedAttention(request, bias=True, rotated=rotated), GeluMlp(spec, bias=True))


def gemma_block(request: LayerRequest) -> nn.Module:
    """Gemma's: Llama's with GELU."""
    return Block(request.spec, llama_attention(request), _gemma_mlp(request.spec))


def sandwich_block(request: LayerRequest) -> nn.Module:
    """Gemma 2's and 3's; scores under a scaled tanh are the attention core's."""
    return SandwichBlock(request.spec, llama_attention(request), _gemma_mlp(request.spec))


def _gemma_mlp(spec: ModelSpec) -> GatedMlp:
    return GatedMlp(spec.hidden_size, spec.intermediate_size, partial(functional.gelu, approximate="tanh"))


def llama_block(request: LayerRequest) -> nn.Module:
    """Llama's: RMSNorm, rotary grouped-query attention, RMSNorm, gated SiLU MLP."""
    spec = request.spec
    return Block(spec, llama_attention(request), GatedMlp(spec.hidden_size, spec.intermediate_size))


def llama_attention(request: LayerRequest) -> SeparateAttention:
    """Rotary attention, with biases (Qwen2) and norms of queries and keys (Qwen3, OLMo 2) where the model has them."""
    spec = request.spec
    biases: Biases = "all" if spec.attention_bias else "qkv" if spec.qkv_bias else "none"
    return SeparateAttention(request, biases=biases, rotary=True, norms=spec.qk_norm)
