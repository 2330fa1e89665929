"""Process group that records the collectives that torch issues in it, e.g. for DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh

from executor.profiling.recorder import Recorder
from simplan.runs.measurement import IssuedKind

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # of torch 2.13

__all__ = ["RecordedGroup"]


class RecordedGroup(dist.ProcessGroup):
    """Ranks of one axis, for torch's functional collectives.

    torch calls the methods of a Python process group from C++ (``torch/csrc/distributed/c10d/PyProcessGroup.hpp``);
    names ending in ``_coalesced`` are those of one tensor as well. Each name of torch 2.13 follows that of 2.11.

    Args:
        name: Key of torch's registry. DTensor treats equal meshes as one, even after deletion, so that a process
            must name equal groups alike.
        rank: Index of this rank.
        size: Number of ranks.
        inner: Group that communicates; None without other ranks: collectives then leave their results unchanged.
        ranks: Global ranks, in the order of the group.
        recorder: Records every collective; None for no record.

    Attributes:
        ranks: Global ranks.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        inner: dist.ProcessGroup | None = None,
        ranks: tuple[int, ...] = (),
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = cast("GroupName", name)
        self._inner, self.ranks, self._recorder = inner, ranks, recorder
        _unregister_process_group(self._name)
        _register_process_group(self._name, self)

    def mesh(self, axis: str, device_type: str) -> DeviceMesh:
        """One-dimensional mesh of a group without other ranks, also where no process group is there."""
        names = (axis,)
        mesh = DeviceMesh(device_type, list(range(self.size())), mesh_dim_names=names, _init_backend=False, _rank=0)
        mesh._dim_group_names = [self._name]
        mesh._pg_registry[self._name] = self
        return mesh

    def getBackendName(self) -> str:  # noqa: N802
        """Shown by torch in errors."""
        return "recorded"

    def getGroupName(self) -> GroupName:  # noqa: N802
        """Key of torch's registry."""
        return self._name

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """All-reduce in place."""
        return self._issue("all_reduce", tensors, ("allreduce",), tensors, options)

    def all_gather_single_coalesced(self, gathered: list[Tensor], parts: list[Tensor], opts: Any = None) -> dist.Work:
        """Parts of all ranks, one after the other."""
        names = "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        return self._issue("all_gather", gathered, names, gathered, parts, opts)

    def reduce_scatter_single_coalesced(self, own: list[Tensor], parts: list[Tensor], opts: Any = None) -> dist.Work:
        """Own part of the sum."""
        names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        return self._issue("reduce_scatter", parts, names, own, parts, opts)

    def all_to_all_single(
        self, received: Tensor, parts: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """Part of every rank for this one."""
        names = "all_to_all_single", "alltoall_base"
        return self._issue("all_to_all", [parts], names, received, parts, out_sizes, in_sizes, opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _issue(self, kind: IssuedKind, buffers: list[Tensor], names: tuple[str, ...], *arguments: Any) -> dist.Work:
        """Calls the group's method under the first of the names that the group has."""
        if self._inner is None:
            return FakeWork()
        call = getattr(self._inner, next(name for name in names if hasattr(self._inner, name)))
        recorder = self._recorder
        if recorder is None:
            return call(*arguments)  # type: ignore[no-any-return]
        handle = recorder.issue(kind, self.ranks, sum(buffer.nbytes for buffer in buffers))
        return _RecordedWork(call(*arguments), lambda: recorder.complete(handle))


class _RecordedWork(dist.Work):
    """Tells when the collective has been waited for: on CUDA the current stream waits, not the host."""

    def __init__(self, inner: dist.Work, complete: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._complete = inner, complete

    def wait(self, *timeout: Any) -> bool:
        """As torch's."""
        waited = self._inner.wait(*timeout)
        self._complete()
        return waited
