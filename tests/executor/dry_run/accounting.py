"""Predicted memory of one rank, and torch's own account of it on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from executor.dry_run.memory_tracker import MeasuredPeak, MemoryTracker
from executor.dry_run.rehearse import fake_rank
from executor.launch.watchdog import Unwatched
from executor.profiling.recorder import Recorder, make_clock
from executor.train.trainer import Trainer
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.program.action import Action, format_table
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import Program
from simplan.program.tables.plan_table import plan_table
from simplan.runs.run_spec import RunSpec
from simplan.sim.memory import MemoryPeak, memory_peak
from simplan.training import TrainingSpec
from tests.executor.conftest import make_job
from tests.jobs import job_to_lower

CPU = torch.device("cpu")


def predicted_program(job: RunSpec, *, gloo: bool = False) -> Program:
    """What an account is compared with; all tensors are in the memory of this process, those on the host among them.

    Args:
        job: Of the account.
        gloo: With what gloo copies and DDP's second buckets, neither of which there is in the fake process group.
    """
    how = Lowering(host_waits=gloo)
    program = lower(
        job_to_lower(job.model, job.training, job.plan, job.software), job.assignment, job.parsed_table(), how
    )
    if not gloo:
        program.rebuild_bytes.update(dict.fromkeys(program.ranks, 0))
    return replace(program, one_memory=True)


def predicted_peak(job: RunSpec, rank: int, *, gloo: bool = False) -> MemoryPeak:
    """The peak of one rank; arguments as above."""
    return memory_peak(predicted_program(job, gloo=gloo), rank)


def job_of(model: ModelSpec, changes: dict[str, Any], num_microbatches: int, precision: Any, **fields: Any) -> RunSpec:
    """A job of so many microbatches, of two samples unless the plan has others; fields are those of the training."""
    plan = ParallelPlan(**{"microbatch_size": 2, **changes})
    size = num_microbatches * plan.microbatch_size * plan.dp
    return make_job(
        plan.schedule,
        model=model,
        plan=plan.model_dump(exclude={"schedule"}),
        training=TrainingSpec(global_batch_size=size, precision=precision, **fields),
        table=tuple(tuple(row) for row in format_table(plan_table(plan, num_microbatches))),
        dtype=precision,
    )


def peaks(
    model: ModelSpec,
    changes: dict[str, Any],
    num_microbatches: int,
    pp_rank: int,
    precision: Any,
    **fields: Any,
) -> tuple[int, int]:
    """Bytes of a stage's first rank, predicted and torch's own; the job is that of ``job_of``."""
    job = job_of(model, changes, num_microbatches, precision, **fields)
    rank = pp_rank * job.plan.num_devices // job.plan.pp
    return predicted_peak(job, rank).total_bytes, account(job, rank).total_bytes


def account(job: RunSpec, rank: int) -> MeasuredPeak:
    """Torch's own memory of a rank in a step."""
    tracker = MemoryTracker(job, rank, CPU)
    with fake_rank(job, rank, tracker) as trainer:
        return tracker.run_steps(trainer)


@contextmanager
def fake_trainer(job: RunSpec, rank: int) -> Iterator[Trainer]:
    """A rank's trainer on fake tensors, alone in this process."""
    row = job.parsed_table()[RankMapping.of(job.plan).place(rank).pp]
    with fake_rank(job, rank, SilentRecorder(row)) as built:
        yield built


class SilentRecorder(Recorder):
    """Without a heartbeat."""

    def __init__(self, row: Sequence[Action]) -> None:
        super().__init__(row, make_clock(CPU), Unwatched())
