"""Checkpoints and losses that a training saves between two steps, so that the same or other ranks can resume it.

Checkpoints are torch.distributed.checkpoint's: every rank writes its own shards, and one rank writes what several hold.
If a checkpoint cannot be written, for instance because the disk is full, the run reports the failure and continues, and
the previous checkpoint stays.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from executor.distributed.mesh import run_timeout
from executor.launch.rank import RankFiles, RunLog, StopRequest
from executor.profiling.recorder import Recorder
from executor.train.checkpoint_folder import AtomicWriter, DataReader, drop_unfinished, prune, why_damaged
from executor.train.training_state import TrainingState
from simplan.errors import RunError
from simplan.runs.checkpoint import CheckpointHeader, CheckpointTiming, keeps_errors, readable_headers, step_folder
from simplan.runs.run_spec import RunSpec
from simplan.units import format_bytes

_FILE = "losses.jsonl"
_SIGNAL_S = 5.0  # agents of torchrun notice within a second that nodes join
_APPEARS_S = 10.0  # for new files to appear on other nodes, which may cache a folder's content


class PeerStoppedError(RunError):
    """Ranks of another node got a request to stop; torchrun restarts the ranks of this node without them."""


class RunStateSaver:
    """Saves the state of one rank; every rank of the job must make one and call the same methods.

    Args:
        job: The job, with ``checkpointing``.
        files: Files of this rank; rank 0 writes the times of checkpoints, which represent all ranks.
        log: Log to which this rank adds its checkpoints.

    Raises:
        RunError: This rank does not see the files of rank 0.
    """

    def __init__(self, job: RunSpec, state: TrainingState, files: RankFiles, stop: StopRequest, log: RunLog) -> None:
        assert job.checkpointing is not None
        group = dist.new_group(backend="gloo", timeout=run_timeout())  # for the host, also with CUDA devices
        assert isinstance(group, dist.ProcessGroup)
        self._job, self._state, self._stop, self._group = job, state, stop, group
        self._log = log
        self._leads, self._timings = dist.get_rank() == 0, files.checkpoints
        self._folder = Path(job.checkpointing.folder)
        self._every, self._num_kept = job.checkpointing.every, job.checkpointing.keep
        if self._leads:
            drop_unfinished(self._folder)
        self._check_that_ranks_share_the_folder()
        self._losses = _LossLog(self._folder, group) if job.fewer_nodes else None
        stop.can_stop = True

    def _check_that_ranks_share_the_folder(self) -> None:
        """Otherwise rank 0 would take its own files for a complete checkpoint."""
        mark = Path(self._from_rank_0(str(self._folder / f".seen-by-all-{os.getpid()}")))
        if self._leads:
            mark.touch()
        deadline_s = time.monotonic() + _APPEARS_S
        while not mark.exists():
            if time.monotonic() > deadline_s:
                raise RunError(f"{self._folder} is not the folder that rank 0 has; name one that all nodes share")
            time.sleep(0.1)
        dist.barrier(self._group)
        if self._leads:
            mark.unlink()

    def restore(self) -> int:
        """Reads the newest intact checkpoint; returns the number of steps done, 0 if there is none.

        Raises:
            RunError: This rank does not see the files of rank 0. Or torch cannot read the checkpoint, though its
                checksums are right: somebody has changed both.
        """
        headers: list[CheckpointHeader] = self._from_rank_0(readable_headers(self._folder)[0] if self._leads else None)
        for header in headers:
            path = step_folder(self._folder, header.step)
            if not path.is_dir():
                raise RunError(f"{path} is not here, but rank 0 has it: the folder must be one that all nodes share")
            mine = sorted(header.file_sha256)[dist.get_rank() :: dist.get_world_size()]
            if not self._is_any(why_damaged(self._folder, header, mine) is not None):
                try:
                    with_errors = keeps_errors(header.plan, self._job.plan)
                    self._state.restore(DataReader(path), self._group, with_errors=with_errors)
                except CheckpointException as error:  # on all ranks
                    why = f"{path} cannot be read, though its checksums are right: {_first_cause(error)}"
                    raise RunError(f"{why}; delete that folder to resume from the checkpoint before it") from None
                return header.step
        return 0

    def after_step(self, step: int, losses: list[float], recorder: Recorder, *, is_last: bool) -> None:
        """Saves the state if due after a step, and stops this rank if any rank got a request to stop.

        Args:
            step: Number of steps done.
            losses: Losses of the last step on this rank; none on ranks without the last stage.

        Raises:
            SystemExit: This rank got a request to stop; there is a checkpoint, unless writing failed.
            PeerStoppedError: Only other ranks got a request to stop.
        """
        is_due = step % self._every == 0
        if self._losses is not None:
            self._losses.add(step, losses)
            if is_due:
                recorder.waiting("gathering losses", step)
                self._losses.gather()
        recorder.waiting("taking a checkpoint", step)
        if is_due:
            self._take(step)
        if is_last or not self._is_any(self._stop.is_told()):
            return
        recorder.waiting("taking a checkpoint before stopping", step)
        if self._losses is not None:
            self._losses.gather()
        if not is_due:
            self._take(step)
        if self._stop.is_told(_SIGNAL_S):
            raise SystemExit(143)
        raise PeerStoppedError(f"ranks of another node were told to stop after step {step}")

    def _is_any(self, here: bool) -> bool:
        """True where it is true on any rank."""
        anywhere = torch.tensor([int(here)])
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, self._group)
        return bool(anywhere)

    def _take(self, step: int) -> None:
        """Writes a checkpoint of a number of steps, and deletes old ones once it is complete.

        A failure is agreed on by all ranks. If they cannot agree, a rank is gone, and the run ends.
        """
        start_s, failure = time.perf_counter(), None
        writer = AtomicWriter(self._folder, self._job, step)
        try:
            save(self._state.tensors(), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            failure = _why(error, self._folder)
        if not self._leads:
            self._log.add("checkpoint", step)
            return
        if failure is None:
            prune(self._folder, self._num_kept)
        else:
            shutil.rmtree(writer.unfinished, ignore_errors=True)
        timing = CheckpointTiming(step=step, written_s=time.perf_counter() - start_s, failure=failure)
        with self._timings.open("a") as stream:
            stream.write(timing.model_dump_json() + "\n")
        self._log.add("checkpoint", step)

    def _from_rank_0(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]


class _LossLog:
    """Losses of all steps that a resumed run does not repeat, gathered before each checkpoint.

    Args:
        folder: Checkpoint folder, shared by all nodes, since rank 0 may move to another node. It gets one JSON line
            ``{step, loss}`` per step, with the mean over ranks and microbatches.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        self._file, self._group = folder / _FILE, group
        self._pending: dict[int, list[float]] = {}

    def add(self, step: int, losses: list[float]) -> None:
        """Adds this rank's losses of a step, given the number of steps done."""
        self._pending[step - 1] = losses

    def gather(self) -> None:
        """Writes the losses that are not written yet."""
        if not self._pending:
            return
        leads = dist.get_rank() == 0
        gathered: list[dict[int, list[float]]] | None = [{}] * dist.get_world_size() if leads else None
        dist.gather_object(self._pending, gathered, dst=0, group=self._group)
        if gathered is not None:
            means = {k: statistics.fmean(loss for losses in gathered for loss in losses[k]) for k in self._pending}
            with self._file.open("a") as stream:
                stream.writelines(json.dumps({"step": k, "loss": mean}) + "\n" for k, mean in means.items())
        self._pending.clear()


def read_losses(folder: Path) -> dict[int, float]:
    """Loss of every step in a checkpoint folder; an incomplete last line, of a killed writer, is skipped."""
    file = folder / _FILE
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {entry["step"]: entry["loss"] for entry in map(json.loads, (x for x in lines if x.endswith("\n")))}


def _why(error: CheckpointException, folder: Path) -> str:
    """Cause on the first rank that failed, and free space of the disk with the incomplete checkpoint."""
    return f"{_first_cause(error)}; {format_bytes(shutil.disk_usage(folder).free)} are free there"


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
    return f"rank {rank}: {_words(cause)}"


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    if "inline_container" in text:  # torch's own writer, when a write to its file was cut short
        return "a file could not be written to its end"
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
