"""One rank of a job: ``python -m executor.worker JOB.json OUT_DIR``, started by torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from executor.clock import make_clock
from executor.groups import make_groups
from executor.heartbeat import Heartbeat, RankState
from executor.keeping import Keeper
from executor.memory import forget_peaks, peak_allocated_bytes, peak_memory
from executor.out_of_memory import told_when_out_of_memory
from executor.precision import allow_tf32
from executor.rank import RankFiles, attempt, first_rank, live_as_rank, team_number
from executor.recorder import Recorder
from executor.reference import Reference
from executor.stopping import stop_file
from executor.trainer import Trainer
from simplan.files import write_whole
from simplan.program.measurement import PeakMemory
from simplan.program.run_spec import RunSpec
from simplan.spec.plan import RankMapping

__all__ = ["main", "start_rank", "use_device"]

_AFTER_RESTART = 2
"""Uncounted steps in the middle of a training, whose times say nothing about where they end."""


def use_device(device: str, num_ranks: int) -> torch.device:
    """This rank's device, set up for computing: a CUDA device of its own, or its share of the CPU's cores.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA when every rank can have a device.
        num_ranks: Ranks on this machine.
    """
    if device == "cuda" or (device == "auto" and torch.cuda.device_count() >= num_ranks):
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # nobody started a rank that is rehearsed
        torch.cuda.set_device(chosen)
        return chosen
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    return torch.device("cpu")


def start_rank(device: torch.device, timeout_s: float) -> None:
    """Joins the default process group: NCCL on CUDA devices, gloo on the CPU.

    torch's own timeout is longer than the launcher's patience, so that the launcher says who hangs.
    """
    cuda = device.type == "cuda"
    timeout = timedelta(seconds=2 * timeout_s + 60)
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    # one store serves all attempts, also those of other teams: the names of an earlier one's ranks would be found
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore(f"team{team_number()}/attempt{attempt()}", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def main(argv: list[str]) -> None:
    """Runs the job of ``argv[0]`` with its files in ``argv[1]``."""
    out_dir = Path(argv[1])
    live_as_rank(out_dir, lambda heartbeat, rank: _run(Path(argv[0]), out_dir, heartbeat, rank))


def _run(job_file: Path, out_dir: Path, heartbeat: Heartbeat, rank: int) -> RankState:
    job = RunSpec.model_validate_json(job_file.read_bytes())
    device = use_device(job.device, int(os.environ["LOCAL_WORLD_SIZE"]))
    allow_tf32(allowed=job.training.precision == "tf32")
    start_rank(device, job.timeout_s)
    predicted_bytes = job.predicted_memory_bytes[rank] if job.predicted_memory_bytes else None
    with told_when_out_of_memory(device, predicted_bytes):
        ended = _train(job, out_dir, device, heartbeat, rank)
    heartbeat.beat(RankState.WAITING, "waiting for the other ranks to finish")
    _barrier(device)
    dist.destroy_process_group()
    return ended


def _train(job: RunSpec, out_dir: Path, device: torch.device, heartbeat: Heartbeat, rank: int) -> RankState:
    """From building the model to the measured memory, or to where ranks are to stop."""
    heartbeat.beat(RankState.RUNNING, "building the model", 0)
    mapping = RankMapping.of(job.plan)
    table = job.parsed_table()
    groups = make_groups(job.plan, table, rank, tied=job.model.tied_embeddings, experts=job.model.num_experts > 0)
    recorder = Recorder(table[mapping.place(rank).pp], make_clock(device), heartbeat)

    def build() -> Trainer:
        return Trainer(job, rank, device, groups, recorder)

    files = RankFiles(out_dir, rank)
    trainer, first, keeper = build(), 0, None
    forget_peaks(device)
    if job.checkpointing is not None:
        keeper = Keeper(job, trainer.state(), files, stop_file(out_dir, first_rank()), leads=rank == 0)
        if job.checkpointing.resume or attempt() > 0 or team_number() > 0:
            heartbeat.beat(RankState.RUNNING, "reading a checkpoint", 0)
            first = keeper.restore()
    for kept in (files.steps, files.losses) if rank == 0 else (files.steps,):
        _keep_steps_before(first, kept)
    watched: AbstractContextManager[None] = nullcontext()
    if job.software.compiled:
        from executor.compiling import watched_compilation

        watched = watched_compilation(heartbeat)
    with files.steps.open("a") as steps, watched:
        ended = _timed_steps(job, trainer, device, recorder, steps, first, keeper)
        if ended is RankState.FINISHED:
            del trainer, keeper
            memory = _memory(job, build, device, recorder, heartbeat)
            print(memory.model_dump_json(), file=steps, flush=True)
    return ended


def _timed_steps(
    job: RunSpec,
    trainer: Trainer,
    device: torch.device,
    recorder: Recorder,
    file: TextIO,
    first: int,
    keeper: Keeper | None,
) -> RankState:
    """Warm-up and steady steps; one line for each in the rank's file, written outside of the timed part."""
    reference = Reference(device)
    for step in range(first, job.num_all_steps):
        batch = trainer.batch(step)
        recorder.waiting(f"waiting for step {step + 1} to start", step)
        reference_s = reference.time_once()
        _barrier(device)
        recorder.begin_step(step)
        losses = trainer.step(*batch)
        start_s, end_s = recorder.end_step()
        is_warmup = step < first + _num_warmup_steps(job, first)
        record = recorder.record(
            start_s, end_s, [float(loss) for loss in losses], is_warmup=is_warmup, reference_s=reference_s
        )
        print(record.model_dump_json(), file=file, flush=True)
        is_last = step + 1 == job.num_all_steps
        if keeper is not None and keeper.after(step + 1, list(record.losses), recorder, is_last=is_last):
            return RankState.STOPPED
    recorder.waiting("waiting for the other ranks to measure memory", job.num_all_steps)
    return RankState.FINISHED


def _num_warmup_steps(job: RunSpec, first: int) -> int:
    """First steps of these ranks that do not count; left open, the run's first ones are found later by their times."""
    if job.num_warmup_steps is not None:
        return job.num_warmup_steps
    return _AFTER_RESTART if first else 0


def _keep_steps_before(first: int, file: Path) -> None:
    """Of the steps that an earlier attempt of this run has written, those that are not done again."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    kept = (line for line in lines if line.endswith("\n") and json.loads(line).get("step", first) < first)
    write_whole(file, "".join(kept))


def _memory(
    job: RunSpec, build: Callable[[], Trainer], device: torch.device, recorder: Recorder, heartbeat: Heartbeat
) -> PeakMemory:
    """Peak memory of the run; on the CPU, allocations are traced in a second, shorter run of the same training."""
    peak = peak_memory(device)
    if device.type == "cuda" or not job.profile_memory:
        return peak

    def rerun() -> None:
        trainer = build()
        for step in range(2):  # optimizer states exist from the second step on
            batch = trainer.batch(step)
            recorder.begin_step(step)
            trainer.step(*batch)

    heartbeat.beat(RankState.RUNNING, "measuring allocations")
    return peak.model_copy(update={"allocated_bytes": peak_allocated_bytes(rerun)})


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


if __name__ == "__main__":
    main(sys.argv[1:])
