"""Follows the storages of all tensors that a piece of torch code makes, real or fake."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

__all__ = ["Allocation", "Ledger", "storage_key"]


_SHAPES_ONLY = {"_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"}
"""Functions in which DTensor derives shapes of unsharded tensors, which a real run does not allocate."""


@dataclass(slots=True, eq=False)
class Allocation:
    """One storage.

    Attributes:
        num_bytes: Current size in bytes.
        shape: Shape of the tensor that the storage was allocated for.
        callers: Code of the functions that allocated the storage, innermost first.
        born, died: ``Ledger.period`` of the allocation and of the release; None while the storage is alive.
    """

    num_bytes: int
    shape: tuple[int, ...]
    callers: tuple[CodeType, ...]
    born: int
    died: int | None = None

    @property
    def made_in(self) -> Iterator[tuple[str, str]]:
        """Functions that allocated the storage, innermost first, as (file name, function)."""
        return map(_function, self.callers)

    @property
    def outlives_its_period(self) -> bool:
        """True when the storage is alive after the period of its allocation."""
        return self.died is None or self.died > self.born


class Ledger(TorchDispatchMode):
    """Storage tracker: counts bytes of storages that are allocated while the mode is active.

    Attributes:
        total_bytes, peak_bytes: Current bytes, and the largest number so far.
        period: Number of the current period; the user of the ledger increments it.
        on_peak: Called at every new peak; None for no call.
        alive: Live storages, by ``storage_key``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = self.peak_bytes = self.period = 0
        self.on_peak: Callable[[], None] | None = None
        self.alive: dict[int, Allocation] = {}
        self._storages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the tensors inside of DTensors and of quantized ones come next
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which allocations are tracked."""
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if self._storages.get(storage._cdata) is storage:
                self._resized(self.alive[storage._cdata], storage.nbytes())

        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._storages.get(key) is storage:
            return
        callers = _callers()
        if any(code.co_name in _SHAPES_ONLY for code in callers):
            return
        self._storages[key] = storage
        allocation = self.alive[key] = Allocation(0, tuple(tensor.shape), callers, self.period)
        weakref.finalize(storage, self._gone, key, allocation)
        self._resized(allocation, storage.nbytes())

    def _resized(self, allocation: Allocation, num_bytes: int) -> None:
        self.total_bytes += num_bytes - allocation.num_bytes
        allocation.num_bytes = num_bytes
        if self.total_bytes > self.peak_bytes:
            self.peak_bytes = self.total_bytes
            if self.on_peak is not None:
                self.on_peak()

    def _gone(self, key: int, allocation: Allocation) -> None:
        self.total_bytes -= allocation.num_bytes
        allocation.died = self.period
        if self.alive.get(key) is allocation:
            del self.alive[key]


def storage_key(tensor: Tensor) -> int:
    """Key of a tensor's storage, equal for tensors that share it; for a DTensor, of the local tensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    key: int = local.untyped_storage()._cdata
    return key


def _callers() -> tuple[CodeType, ...]:
    """Call stack above the caller, innermost first; code objects only, as this runs for every tensor."""
    found: list[CodeType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return tuple(found)


@cache
def _function(code: CodeType) -> tuple[str, str]:
    return Path(code.co_filename).name, code.co_name
