"""A rank on fake tensors: FakeTensorMode computes nothing, but allocates, saves and frees tensors as in a real run.

The memory of a rank of any size can thus be determined on any machine, in seconds and without allocating it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from executor.distributed.mesh import ParallelDims
from executor.models.model import Stage
from executor.profiling.ledger import Ledger
from executor.profiling.recorded_group import RecordedGroup
from executor.profiling.recorder import Recorder
from executor.train.trainer import Trainer
from simplan.plan.plan import RankMapping
from simplan.program.action import Action
from simplan.runs.measurement import IssuedKind
from simplan.runs.run_spec import RunSpec

__all__ = ["MakeRecorder", "alone_as", "fake_rank"]


@contextmanager
def alone_as(rank: int, job: RunSpec, recorder: Recorder) -> Iterator[ParallelDims]:
    """Context in which this process is one rank of the job with a fake process group; yields the rank's mesh axes.

    Args:
        rank: Global rank.
        job: The job.
        recorder: Records the rank's collectives.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.plan.num_devices)
    try:
        yield ParallelDims.of(job, rank, recorder, alone=True)
    finally:
        dist.destroy_process_group()


_c10d = torch.ops._c10d_functional
_COLLECTIVES: dict[Any, IssuedKind] = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
}

MakeRecorder = Callable[[Sequence[Action]], Recorder]
"""Makes a recorder from a rank's row of the table."""


@contextmanager
def fake_rank(job: RunSpec, rank: int, make_recorder: MakeRecorder, ledger: Ledger | None = None) -> Iterator[Trainer]:
    """Context with a rank's trainer on fake tensors; the trainer may only be used inside of the block.

    Args:
        job: The job, whose device is the CPU.
        rank: Global rank.
        make_recorder: Makes the recorder of the rank.
        ledger: Tracks all tensors of the rank; None for no tracking.
    """
    row = job.parsed_table()[RankMapping.of(job.plan).place(rank).pp]
    counting = nullcontext() if ledger is None else ledger.counting()
    recorder = make_recorder(row)
    with (
        alone_as(rank, job, recorder) as dims,
        _meshes_with_numbers(),
        FakeTensorMode(),
        counting,
        _Listening(recorder),
    ):
        yield _FakeTrainer(job, rank, torch.device("cpu"), dims, recorder)


@contextmanager
def _meshes_with_numbers() -> Iterator[None]:
    """Lets FSDP join its mesh and a DTensor's mesh, whose ranks are real numbers while all other tensors are fake."""
    join = DeviceMesh._concatenate

    def join_numbers(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(meshes)

    DeviceMesh._concatenate = staticmethod(join_numbers)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign]


class _Listening(TorchDispatchMode):
    """Records DTensor's collectives, which do not reach a process group for fake tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come next
        result = func(*args, **(kwargs or {}))
        if (kind := _COLLECTIVES.get(func)) is not None:
            whole = result if kind == "all_gather" else args[0]
            group = _resolve_process_group(args[-1])
            assert isinstance(group, RecordedGroup)
            self._recorder.complete(self._recorder.issue(kind, group.ranks, whole.nbytes))
        return result


class _FakeTrainer(Trainer):
    def _wrap(self, stage: Stage) -> nn.Module:
        module = super()._wrap(stage)
        if isinstance(module, DistributedDataParallel):
            module.reducer = _KeptBuckets(module.reducer)  # type: ignore[assignment]
        return module


class _KeptBuckets:
    """DDP's reducer without rebuilt buckets: rebuilding broadcasts their order, which needs real tensors."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
