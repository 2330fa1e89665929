"""Tensor and sequence parallelism as in Megatron-LM, on plain tensors: collectives between matrices split in pairs.

Shoeybi et al. 2019 (arXiv:1909.08053), section 3, and Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.
Hidden states are (batch, tokens, hidden_size); ranks split tokens along dimension 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.distributed.mesh import ParallelDims, Peers
from executor.models.lora import LoraLinear

__all__ = [
    "column_linear",
    "compute_dtype",
    "embed_tokens",
    "for_columns",
    "gather_parts",
    "row_linear",
    "scatter_sum",
]

_TOKENS = 1  # the dimension


def column_linear(x: Tensor, linears: Sequence[nn.Linear], parallel: ParallelDims) -> list[Tensor]:
    """Applies linear layers of which each rank has some of the columns to one input.

    Args:
        x: (batch, tokens, k); with sequence parallelism each rank's own tokens.
        linears: With the rank's weights (n, k).
        parallel: The ranks.

    Returns:
        (batch, tokens, n) for each, all tokens.
    """
    x = compute_dtype(x)
    if not parallel.splits_tokens:
        x = for_columns(x, parallel)
        return [linear(x) for linear in linears]
    adapted = [linear for linear in linears if isinstance(linear, LoraLinear)]
    weights = [compute_dtype(weight) for weight in [x.weight for x in linears] + [x.lora_a.weight for x in adapted]]
    outputs: tuple[Tensor, ...] = _GatheredLinears.apply(x, parallel.tp, *weights)  # type: ignore[no-untyped-call]
    narrow = iter(outputs[len(linears) :])
    products = []
    for linear, product in zip(linears, outputs, strict=False):
        y = linear.adapted(product, next(narrow)) if isinstance(linear, LoraLinear) else product
        products.append(y if linear.bias is None else y + compute_dtype(linear.bias))
    return products


def for_columns(x: Tensor, parallel: ParallelDims) -> Tensor:
    """What each rank needs for its own columns of something: all tokens, whose gradients are those of all ranks.

    Args:
        x: (batch, tokens, k); with sequence parallelism each rank's own tokens.
        parallel: The ranks.
    """
    if parallel.tp.size == 1:
        return x
    if parallel.splits_tokens:
        return gather_parts(x, parallel.tp)
    y: Tensor = _SumGradients.apply(x, parallel.tp)  # type: ignore[no-untyped-call]
    return y


def row_linear(x: Tensor, linear: nn.Linear, parallel: ParallelDims) -> Tensor:
    """Applies a linear layer of which each rank has some of the rows; its bias is added to the sum.

    Args:
        x: (batch, tokens, k), the rank's columns of the input.
        linear: With the rank's weight (n, k).
        parallel: The ranks.

    Returns:
        (batch, tokens, n); with sequence parallelism each rank's own tokens.
    """
    if parallel.tp.size == 1:
        return linear(x)  # type: ignore[no-any-return]
    product = functional.linear(x, linear.weight)
    if isinstance(linear, LoraLinear):
        product = linear.adapted(product, linear.lora_a(x))
    y = _reduced(product, parallel)
    return y if linear.bias is None else y + compute_dtype(linear.bias)


def embed_tokens(tokens: Tensor, embedding: nn.Embedding, parallel: ParallelDims) -> Tensor:
    """Looks up tokens (batch, tokens) in an embedding of which each rank has a part of the vocabulary.

    Returns:
        (batch, tokens, hidden_size); with sequence parallelism each rank's own tokens.
    """
    if parallel.tp.size == 1:
        return embedding(tokens)  # type: ignore[no-any-return]
    own = tokens - parallel.tp.rank * embedding.num_embeddings
    foreign = (own < 0) | (own >= embedding.num_embeddings)
    x = embedding(own.masked_fill_(foreign, 0))
    return _reduced(x.masked_fill_(foreign.unsqueeze(-1), 0.0), parallel)


def compute_dtype(x: Tensor) -> Tensor:
    """In the precision of matrix products: under autocast its dtype, cast once and not by each product again."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype is torch.float32:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _reduced(x: Tensor, parallel: ParallelDims) -> Tensor:
    if parallel.splits_tokens:
        return scatter_sum(x, parallel.tp, keeps=True)
    y: Tensor = _Sum.apply(x, parallel.tp)  # type: ignore[no-untyped-call]
    return y


def gather_parts(x: Tensor, peers: Peers, dim: int = _TOKENS) -> Tensor:
    """What all ranks have, along a dimension; each gets the sum of the gradients of its own."""
    y: Tensor = _Gather.apply(x, peers, dim)  # type: ignore[no-untyped-call]
    return y


def scatter_sum(x: Tensor, tp: Peers, *, keeps: bool = False) -> Tensor:
    """The own part, along dimension 1, of the sum over all ranks.

    Args:
        x: What this rank has.
        tp: The ranks.
        keeps: Blocks of ``selective_op`` keep the result.
    """
    y: Tensor = _ScatterSum.apply(x, tp, keeps)  # type: ignore[no-untyped-call]
    return y


class _Gather(torch.autograd.Function):
    """All-gather in forward, reduce-scatter of the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return peers.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        return ctx.peers.reduce_scatter(grad_outputs[0], ctx.dim), None, None


class _SumGradients(torch.autograd.Function):
    """Megatron's f: the same in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Peers) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(grad_outputs[0].contiguous()), None


class _Sum(torch.autograd.Function):
    """Megatron's g: all-reduce in forward, the same in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Peers) -> Tensor:
        if x._is_view():  # of what a compiled part gives, which must not be changed
            return tp.all_reduce(x.clone())
        ctx.mark_dirty(x)
        return tp.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _ScatterSum(torch.autograd.Function):
    """Reduce-scatter of tokens in forward, all-gather of their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Peers, keeps: bool) -> Tensor:
        ctx.tp = tp
        return tp.reduce_scatter(x, _TOKENS, keeps=keeps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        return ctx.tp.all_gather(grad_outputs[0], _TOKENS), None, None


class _GatheredLinears(torch.autograd.Function):
    """Products of all tokens with weights, of which only the own tokens are kept; backward gathers them again.

    Where all weights are frozen it does neither.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Peers, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        needs_x, _, *needed = ctx.needs_input_grad
        ctx.save_for_backward(x if any(needed) else None, *(weights if needs_x else ()))
        gathered = tp.all_gather(x, _TOKENS)
        return tuple(functional.linear(gathered, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad
        grad_weights: list[Tensor | None] = [None] * len(needed)
        if any(needed):
            gathered = ctx.tp.all_gather(x, _TOKENS)
            for index, grad in enumerate(grad_outputs):
                if needed[index]:
                    grad_weights[index] = grad.flatten(0, -2).T @ gathered.flatten(0, -2)
            del gathered
        if not needs_x:
            return None, None, *grad_weights
        grad_x = grad_outputs[0] @ weights[0]
        for grad, weight in zip(grad_outputs[1:], weights[1:], strict=True):
            grad_x += grad @ weight
        return ctx.tp.reduce_scatter(grad_x, _TOKENS), None, *grad_weights
