"""Modules with plans for tensor parallelism, as a user writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

HIDDEN, HEADS, TOKENS, VOCABULARY = 32, 4, 16, 64


class Attention(nn.Module):
    """Heads of which each rank has some."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part(x).view(b, t, -1, self.width).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(b, t, -1))
        return out


class Mlp(nn.Module):
    """Two matrices, with biases."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, with norms before them."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """A language model."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def decoder_batch(number: int) -> tuple[Tensor, ...]:
    return (torch.randint(VOCABULARY, (number, TOKENS)),)


def by_heads() -> dict[str, Any]:
    """Without sequence parallelism: each matrix names its input."""
    plan: dict[str, Any] = {f"layers.*.attention.{name}": ColwiseParallel() for name in "qkv"}
    return plan | {
        "layers.*.attention.o": RowwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
    }


def by_tokens() -> dict[str, Any]:
    """With sequence parallelism between matrices, as torch's tutorial has it."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return by_heads() | {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm1": SequenceParallel(),
        "layers.*.norm2": SequenceParallel(),
        "layers.*.attention": gathered,
        "layers.*.mlp": gathered,
        "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def with_split_loss() -> dict[str, Any]:
    """Logits and loss of a part of the vocabulary (``loss_parallel``)."""
    logits = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return by_tokens() | {"head": logits}


class Perceptron(nn.Module):
    """Pairs of matrices between which nothing repeats."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.last(functional.relu(self.second(functional.relu(self.first(x))))).squeeze(-1)
        return functional.mse_loss(scores, y)


def perceptron_batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(number, 16), "y": torch.randn(number)}


def split_perceptron(module: nn.Module, mesh: DeviceMesh) -> None:
    """Applies its plan itself."""
    parallelize_module(module, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
