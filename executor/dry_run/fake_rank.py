"""A rank without data: torch's FakeTensorMode computes nothing, but tensors are made, kept and let go as in a real run.

So torch's own memory of a rank of any size can be had on any machine, in seconds and without allocating any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.distributed.mesh import ParallelDims
from executor.models.model import Stage
from executor.profiling.ledger import Ledger
from executor.profiling.recorder import Recorder
from executor.train.trainer import Trainer
from simplan.program.action import Action
from simplan.program.run_spec import RunSpec
from simplan.spec.plan import RankMapping

__all__ = ["MakeRecorder", "alone_as", "fake_rank"]


@contextmanager
def alone_as(rank: int, job: RunSpec, recorder: Recorder) -> Iterator[ParallelDims]:
    """This process is a rank of the job while the block runs; gives its place in the mesh.

    Args:
        rank: Which.
        job: The job.
        recorder: Is told of its collectives.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.plan.num_devices)
    try:
        yield ParallelDims.of(job, rank, recorder, alone=True)
    finally:
        dist.destroy_process_group()


MakeRecorder = Callable[[Sequence[Action]], Recorder]
"""Makes a recorder from a rank's row of the table."""


@contextmanager
def fake_rank(job: RunSpec, rank: int, make_recorder: MakeRecorder, ledger: Ledger | None = None) -> Iterator[Trainer]:
    """A rank's trainer on fake tensors; all it does must be done inside of the block.

    Args:
        job: The job, whose device is the CPU.
        rank: Which rank.
        make_recorder: Makes its recorder.
        ledger: Counts its tensors, from the first on.
    """
    row = job.parsed_table()[RankMapping.of(job.plan).place(rank).pp]
    counting = nullcontext() if ledger is None else ledger.counting()
    recorder = make_recorder(row)
    with alone_as(rank, job, recorder) as dims, FakeTensorMode(), counting:
        yield _FakeTrainer(job, rank, torch.device("cpu"), dims, recorder)


class _FakeTrainer(Trainer):
    def _wrap(self, stage: Stage) -> nn.Module:
        module = super()._wrap(stage)
        if isinstance(module, DistributedDataParallel):
            module.reducer = _KeptBuckets(module.reducer)  # type: ignore[assignment]
        return module


class _KeptBuckets:
    """DDP's reducer, but it keeps its first buckets: their new order would be sent round, which takes numbers."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
