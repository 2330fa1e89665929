"""Tensor and sequence parallelism by torch's DTensor: matrices split in pairs, by columns and then by rows.

Shoeybi et al. 2019 (arXiv:1909.08053), section 3, and Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2. The
placements are those of torch's ColwiseParallel, RowwiseParallel and PrepareModuleInput; torch issues the collectives.
Hidden states are (batch, tokens, hidden_size); with sequence parallelism ranks split dimension 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
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
    "split_parameters",
]

_TOKENS = 1  # the dimension
_COLUMNS, _ROWS = Shard(0), Shard(1)  # of a weight (outputs, inputs)


def split_parameters(layer: nn.Module, dimensions: dict[str, int], parallel: ParallelDims) -> None:
    """Makes DTensors of the weights of which every tensor-parallel rank has a part.

    Args:
        layer: With this rank's parts.
        dimensions: By name of a parameter, the dimension along which ranks split it.
        parallel: The ranks.
    """
    for name, dimension in dimensions.items():
        path, _, last = name.rpartition(".")
        module = layer.get_submodule(path)
        parameter = module.get_parameter(last)
        if isinstance(parameter, DTensor):
            continue  # the embedding's
        part = _placed(parameter.detach(), Shard(dimension), parallel)
        module.register_parameter(last, nn.Parameter(part, requires_grad=parameter.requires_grad))


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
    if parallel.tp.size == 1:
        return [linear(x) for linear in linears]
    gathered = _all_tokens(x, parallel)
    return [_product(gathered, linear, _COLUMNS, parallel).to_local() for linear in linears]


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
    y = _summed(_product(_placed(x, Shard(x.dim() - 1), parallel), linear, _ROWS, parallel), parallel)
    return y if linear.bias is None else y + compute_dtype(linear.bias)


def embed_tokens(tokens: Tensor, embedding: nn.Embedding, parallel: ParallelDims) -> Tensor:
    """Looks up tokens (batch, tokens) in an embedding of which each rank has a part of the vocabulary.

    torch's RowwiseParallel of an embedding makes the gradient of the whole vocabulary on every rank
    (``tests/executor/test_split_layers.py``).

    Returns:
        (batch, tokens, hidden_size); with sequence parallelism each rank's own tokens.
    """
    if parallel.tp.size == 1:
        return embedding(tokens)  # type: ignore[no-any-return]
    weight = embedding.weight.to_local() if isinstance(embedding.weight, DTensor) else embedding.weight
    own = tokens - parallel.tp.rank * len(weight)
    foreign = (own < 0) | (own >= len(weight))
    x = functional.embedding(own.masked_fill_(foreign, 0), weight)
    return _summed(_placed(x.masked_fill_(foreign.unsqueeze(-1), 0.0), Partial(), parallel), parallel)


def for_columns(x: Tensor, parallel: ParallelDims) -> Tensor:
    """All tokens, of which each rank needs something for its own columns; gradients are summed over ranks.

    Args:
        x: (batch, tokens, k); with sequence parallelism each rank's own tokens.
        parallel: The ranks.
    """
    if parallel.tp.size == 1:
        return x
    return _all_tokens(x, parallel).to_local(grad_placements=(Partial(),))


def compute_dtype(x: Tensor) -> Tensor:
    """In the precision of matrix products: under autocast its dtype, cast once and not by each product again."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype is torch.float32:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _product(x: DTensor, linear: nn.Linear, split: Shard, parallel: ParallelDims) -> DTensor:
    """X W', with a bias that is split as columns are, and with adapters, whose weights are no DTensors."""
    weight = _weight(linear.weight, split, parallel)
    bias = _weight(linear.bias, split, parallel) if linear.bias is not None and split is _COLUMNS else None
    product: Any = functional.linear(x, weight, bias)
    if isinstance(linear, LoraLinear):
        is_column = split is _COLUMNS
        narrow = linear.lora_a(x.to_local(grad_placements=(Partial(),) if is_column else x.placements))
        placements = product.placements if is_column else (Replicate(),)  # all ranks have the gradient of a sum
        adapted = linear.adapted(product.to_local(grad_placements=placements), narrow)
        product = DTensor.from_local(adapted, product.device_mesh, product.placements, run_check=False)
    return product  # type: ignore[no-any-return]


def _weight(weight: Tensor, split: Shard, parallel: ParallelDims) -> DTensor:
    """A weight as a DTensor; DDP and ZeRO-1 have parts of weights as they are."""
    return weight if isinstance(weight, DTensor) else _placed(weight, split, parallel)


def _all_tokens(x: Tensor, parallel: ParallelDims) -> DTensor:
    own = Shard(_TOKENS) if parallel.splits_tokens else Replicate()
    return _placed(x, own, parallel).redistribute(placements=(Replicate(),))


def _summed(x: DTensor, parallel: ParallelDims) -> Tensor:
    tokens = Shard(_TOKENS) if parallel.splits_tokens else Replicate()
    return x.redistribute(placements=(tokens,)).to_local()


def _placed(x: Tensor, placement: Placement, parallel: ParallelDims) -> DTensor:
    return DTensor.from_local(x, parallel.tp.mesh, (placement,), run_check=False)


def gather_parts(x: Tensor, peers: Peers, dim: int = _TOKENS) -> Tensor:
    """All-gather along a dimension; in backward each rank gets the sum of the gradients of its part."""
    whole = DTensor.from_local(x, peers.mesh, (Shard(dim),), run_check=False).redistribute(placements=(Replicate(),))
    return whole.to_local(grad_placements=(Partial(),))


def scatter_sum(x: Tensor, tp: Peers) -> Tensor:
    """Reduce-scatter along dimension 1; backward gathers the gradients."""
    summed = DTensor.from_local(x, tp.mesh, (Partial(),), run_check=False)
    return summed.redistribute(placements=(Shard(_TOKENS),)).to_local()
