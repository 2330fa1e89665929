"""Llama in plain torch, tensor-parallel by ``parallelize_module``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from simplan.model.model import ModelSpec

_ROTARY_BASE = 10_000.0


class LlamaAttention(nn.Module):
    """Rotary causal attention; input and output have the shape (batch, tokens, hidden_size)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h = spec.hidden_size
        self._head_dim = spec.head_dim
        self.cos: Tensor
        self.sin: Tensor
        self.q, self.k, self.v, self.o = (nn.Linear(h, h, bias=False) for _ in range(4))
        frequencies = _ROTARY_BASE ** (-torch.arange(0, spec.head_dim, 2) / spec.head_dim)
        angles = torch.outer(torch.arange(spec.seq_len).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute attention for the heads of this rank."""
        q, k, v = (matrix(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for matrix in (self.q, self.k, self.v))
        out = functional.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        attended: Tensor = self.o(out.transpose(1, 2).flatten(-2))
        return attended

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin


class Mlp(nn.Module):
    """Gated SiLU MLP."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h, i = spec.hidden_size, spec.intermediate_size
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in ((h, i), (h, i), (i, h)))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP; input and output have the shape (batch, tokens, hidden_size)."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class LlamaBlock(nn.Module):
    """Attention and MLP, each after an RMSNorm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(spec.hidden_size), nn.RMSNorm(spec.hidden_size)
        self.attention, self.mlp = LlamaAttention(spec), Mlp(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block on hidden states."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TorchLlama(nn.Module):
    """Llama model: tokens (batch, tokens) to logits (batch, tokens, vocab_size)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(LlamaBlock(spec) for _ in range(spec.num_hidden_layers))
        self.norm = nn.RMSNorm(spec.hidden_size)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def tensor_parallel_llama(spec: ModelSpec, mesh: DeviceMesh) -> TorchLlama:
    """Make the model, parallelized as in torch's tutorial on tensor and sequence parallelism.

    Args:
        spec: Sizes of the model; query and key heads have equal numbers.
        mesh: One-dimensional mesh of the ranks.
    """
    own_tokens, columns = Shard(1), ColwiseParallel()
    gathered = PrepareModuleInput(input_layouts=(own_tokens,), desired_input_layouts=(Replicate(),))
    rows = RowwiseParallel(output_layouts=own_tokens)
    block: dict[str, ParallelStyle] = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    block |= {"attention": gathered, "mlp": gathered, "attention.o": rows, "mlp.down": rows}
    block |= dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), columns)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=own_tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=own_tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"blocks.*.{name}": style for name, style in block.items()}
    model = TorchLlama(spec)
    parallelize_module(model, mesh, plan)
    return model
