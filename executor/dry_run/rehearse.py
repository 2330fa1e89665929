"""Rehearses one rank of a job of any size on the one device here, or on none.

On a real device the rank's own kernels and allocator run, and no peer exists (``alone``); on fake tensors only its
memory and what it issues are had (``fake_rank``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import torch

from executor.checks import check_rehearsal
from executor.distributed.precision import allow_tf32
from executor.dry_run.account import Account, CountingRecorder, counted_steps
from executor.dry_run.fake_rank import alone_as, fake_rank
from executor.profiling.ledger import Ledger
from executor.profiling.memory import forget_peaks, peak_memory
from executor.profiling.recorder import Recorder, StepRecord, make_clock
from executor.profiling.results import environment
from executor.train.trainer import Trainer
from executor.worker import use_device
from simplan.errors import RunError
from simplan.plan.plan import RankMapping
from simplan.program.action import Action
from simplan.runs.measurement import PeakMemory
from simplan.runs.rehearsal import ActionTime, Rehearsal
from simplan.runs.run_spec import RunSpec

__all__ = ["Progress", "fake_account", "rehearse"]

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""

_CPU = torch.device("cpu")
_COUNTED_STEPS = 2
_NO_PEERS: dict[str, str | int | float | None] = {"backend": "fake"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def rehearse(job: RunSpec, rank: int, *, fake: bool, on_progress: Progress | None = None) -> Rehearsal:
    """Runs one rank alone in this process.

    Args:
        job: The job; its device is used unless ``fake``.
        rank: Global rank to run.
        fake: Run on fake tensors, without compute or allocations.
        on_progress: Called after every step.

    Raises:
        SpecError, ProgramError: The job cannot be rehearsed here; nothing was started.
        RunError: The device has too little memory; the error names the action.
    """
    check_rehearsal(job, rank, fake=fake)
    if fake:
        return _fake(job, rank)
    return _real(job, rank, on_progress or (lambda done, of: None))


def fake_account(job: RunSpec, rank: int) -> Account:
    """Torch's own memory of a rank in a step."""
    return _fake_steps(job, rank)[0]


def _fake(job: RunSpec, rank: int) -> Rehearsal:
    found, record = _fake_steps(job, rank)
    return Rehearsal(
        job=job,
        rank=rank,
        fake=True,
        peak_memory=PeakMemory(allocated_bytes=found.total_bytes),
        peak_by_category=found.by_category,
        peak_action=found.action,
        collectives=record.collectives,
        environment=environment(1, cuda=False) | _NO_PEERS | {"device": "none: tensors without data"},
    )


def _fake_steps(job: RunSpec, rank: int) -> tuple[Account, StepRecord]:
    ledger, recorders = Ledger(), []

    def make_recorder(row: Sequence[Action]) -> Recorder:
        recorders.append(CountingRecorder(row, make_clock(_CPU), ledger))
        return recorders[0]

    with fake_rank(job, rank, make_recorder, ledger) as built:
        found = counted_steps(job, built, recorders[0], ledger)
        return found, recorders[0].record(*recorders[0].end_step(), losses=())


def _real(job: RunSpec, rank: int, on_progress: Progress) -> Rehearsal:
    num_steps = _COUNTED_STEPS + job.num_all_steps
    device = use_device(job.device, job.plan.num_devices)
    allow_tf32(allowed=job.training.precision == "tf32")
    ledger = Ledger()
    row = job.parsed_table()[RankMapping.of(job.plan).place(rank).pp]
    recorder = CountingRecorder(row, make_clock(device), ledger)
    try:
        with alone_as(rank, job, recorder) as dims:
            exchanging = {peers.ranks for peers in (dims.tp, dims.cp, dims.ep) if peers.size > 1}
            with ledger.counting():
                trainer = Trainer(job, rank, device, dims, recorder)
                forget_peaks(device)
                found = counted_steps(job, trainer, recorder, ledger)
            on_progress(_COUNTED_STEPS, num_steps)
            records = []
            for step in range(_COUNTED_STEPS, num_steps):
                records.append(_timed_step(trainer, recorder, step))
                on_progress(step + 1, num_steps)
            peak = peak_memory(device)
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        raise RunError(f"rank {rank} needs more memory than this device has, in {recorder.current}: {said}") from None
    if device.type == "cpu":  # without an allocator that counts
        peak = peak.model_copy(update={"allocated_bytes": found.total_bytes})
    return Rehearsal(
        job=job,
        rank=rank,
        fake=False,
        peak_memory=peak,
        peak_by_category=found.by_category,
        peak_action=found.action,
        actions=_action_times(records[-job.num_steps :], exchanging if device.type == "cuda" else None),
        collectives=records[-1].collectives,
        environment=environment(job.plan.num_devices, cuda=device.type == "cuda") | _NO_PEERS,
    )


def _timed_step(trainer: Trainer, recorder: Recorder, step: int) -> StepRecord:
    batch = trainer.batch(step)
    recorder.begin_step(step)
    trainer.step(*batch)
    start_s, end_s = recorder.end_step()
    return recorder.record(start_s, end_s, losses=())


def _action_times(
    records: Sequence[StepRecord], exchanging: Collection[tuple[int, ...]] | None
) -> tuple[ActionTime, ...]:
    """Durations of each action, without the time of the fake process group inside of its span.

    Args:
        records: Records of the measured steps.
        exchanging: Groups whose collectives run on the compute stream; None for all groups. On CUDA, data-parallel
            collectives run on separate streams.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for record in records:
        moved = [
            (c.start_s, c.end_s)
            for c in record.collectives
            if c.end_s is not None and c.kind in _COLLECTIVES and (exchanging is None or c.ranks in exchanging)
        ]
        for span in record.spans:
            inside = [end_s - start_s for start_s, end_s in moved if span.start_s <= start_s and end_s <= span.end_s]
            seconds[span.action].append(max(0.0, span.end_s - span.start_s - sum(inside)))
    return tuple(ActionTime(action=action, seconds=tuple(found)) for action, found in seconds.items())
