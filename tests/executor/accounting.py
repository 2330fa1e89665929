"""Predicted memory of one rank, and torch's own account of it on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from executor.account import Account
from executor.clock import make_clock
from executor.fake_rank import MakeRecorder, fake_rank
from executor.heartbeat import Unwatched
from executor.recorder import Recorder
from executor.rehearse import fake_account
from executor.trainer import Trainer
from simplan.program.action import Action
from simplan.program.job import Job
from simplan.program.lower import Lowering, lower
from simplan.program.program import Program
from simplan.sim.memory import MemoryPeak, memory_peak

__all__ = ["SilentRecorder", "account", "fake_trainer", "predicted_peak", "predicted_program"]


def predicted_program(job: Job, *, gloo: bool = False) -> Program:
    """What an account is compared with; all tensors are in the memory of this process, those on the host among them.

    Args:
        job: Of the account.
        gloo: With what gloo copies and DDP's second buckets, neither of which there is in the fake process group.
    """
    how = Lowering(host_waits=gloo)
    program = lower(job.model, job.training, job.plan, job.software, job.assignment, job.parsed_table(), how)
    if not gloo:
        program.rebuild_bytes.update(dict.fromkeys(program.ranks, 0))
    return replace(program, one_memory=True)


def predicted_peak(job: Job, rank: int, *, gloo: bool = False) -> MemoryPeak:
    """The peak of one rank; arguments as above."""
    return memory_peak(predicted_program(job, gloo=gloo), rank)


def account(job: Job, rank: int) -> Account:
    """Torch's own memory of a rank in a step."""
    return fake_account(job, rank)


@contextmanager
def fake_trainer(job: Job, rank: int, make_recorder: MakeRecorder) -> Iterator[Trainer]:
    """A rank's trainer on fake tensors, alone in this process."""
    with fake_rank(job, rank, make_recorder) as built:
        yield built


class SilentRecorder(Recorder):
    """Without a heartbeat."""

    def __init__(self, row: Sequence[Action]) -> None:
        super().__init__(row, make_clock(torch.device("cpu")), Unwatched())
