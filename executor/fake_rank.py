"""A rank without data: torch's FakeTensorMode computes nothing, but tensors are made, kept and let go as in a real run.

So torch's own memory of a rank of any size can be had on any machine, in seconds and without allocating any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from executor.alone import alone_as
from executor.ledger import Ledger
from executor.model import Stage
from executor.recorder import Recorder
from executor.trainer import Trainer
from simplan.program.action import Action
from simplan.program.run_spec import RunSpec
from simplan.spec.plan import RankMapping

__all__ = ["MakeRecorder", "fake_rank"]

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
    with alone_as(rank, job) as groups, FakeTensorMode(), counting:
        yield _FakeTrainer(job, rank, torch.device("cpu"), groups, make_recorder(row))


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
