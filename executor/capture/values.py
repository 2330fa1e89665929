"""Values of a batch, for modules that turn them into numbers of Python: grids of patches, masks, tokens of images.

Weights and activations have no data. What follows from the batch and from constants alone is small, and is computed:
positions, masks, lengths. It stays a tensor with data until it meets a tensor without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves, tree_map_only

NEEDS_VALUES = DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode
"""Errors of operators on tensors without data whose results depend on values."""
MAX_ELEMENTS = 2**26
"""Elements of the largest tensor with data."""


class Values:
    """Runs operators on data as far as there is some."""

    def __init__(self) -> None:
        self._unknown: set[int] = set()  # addresses of storages with data into which tensors without data were written
        self._kept: list[Tensor] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator: with data if all of its operands have some, else without."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        writes = func._schema.is_mutable
        if func.is_view and not any(isinstance(leaf, FakeTensor) for leaf in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if any(isinstance(leaf, FakeTensor) or _address(leaf) in self._unknown for leaf in tensors):
            if func.overloadpacket in _INDEXING:
                args = (args[0], self._indices(args[1]), *args[2:])
            with unset_fake_temporarily():
                args, kwargs = tree_map_only(Tensor, _without_graph, (args, kwargs))
            output = func(*args, **kwargs)
            if not writes or isinstance(tensors[0], FakeTensor):
                return output
            self._kept.append(tensors[0])
            self._unknown.add(_address(tensors[0]))
            return tensors[0]
        if not writes and _is_large(func, args, kwargs):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _indices(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices, with numbers in the place of masks with data, so that there is no doubt how many there are."""
        expanded = list[Tensor | None]()
        for index in indices:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            if index is None or not is_mask or isinstance(index, FakeTensor) or _address(index) in self._unknown:
                expanded.append(index)
            else:
                with unset_fake_temporarily():
                    expanded += index.nonzero(as_tuple=True)
        return expanded


_INDEXING = frozenset({torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_})


def _without_graph(tensor: Tensor) -> Tensor:
    """A tensor with data as a leaf: of others torch warns while it takes their data away."""
    return tensor if isinstance(tensor, FakeTensor) or not tensor.requires_grad else tensor.detach()


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_large(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a result is too large to have data."""
    leaves = tree_leaves((args, kwargs))
    sizes = sorted((leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), reverse=True)
    # two operands make at most an outer product, and numbers say how often it is repeated, or how large a result is
    if prod(sizes[:2]) * prod(abs(leaf) or 1 for leaf in leaves if isinstance(leaf, int)) <= MAX_ELEMENTS:
        return False
    try:
        made = func(*args, **kwargs)
    except NEEDS_VALUES:
        return False
    return any(leaf.numel() > MAX_ELEMENTS for leaf in tree_leaves(made) if isinstance(leaf, Tensor))


def with_values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the batch with its data, numbers in floating point in the given dtype."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()
