"""Checkpoints and losses that a training saves between two steps, so that other ranks can resume it."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from executor.launch.rank import RankFiles, StopRequest
from executor.profiling.recorder import Recorder
from executor.train.checkpoints import Checkpoints
from executor.train.training_state import TrainingState
from simplan.errors import RunError
from simplan.runs.checkpoint import CheckpointTiming
from simplan.runs.run_spec import RunSpec

__all__ = ["Keeper", "PeerStoppedError", "read_losses"]

_FILE = "losses.jsonl"
_SIGNAL_S = 5.0  # agents of torchrun notice within a second that nodes join


class PeerStoppedError(RunError):
    """Ranks of another node got a request to stop; torchrun restarts the ranks of this node without them."""


class Keeper:
    """Saves the state of one rank; every rank of the job must make one and call the same methods.

    Args:
        job: The job, with ``checkpointing``.
        state: State of this rank.
        files: Files of this rank.
        stop: Tells if this rank is to stop.
        leads: This is rank 0, which writes the times of checkpoints.
    """

    def __init__(self, job: RunSpec, state: TrainingState, files: RankFiles, stop: StopRequest, *, leads: bool) -> None:
        assert job.checkpointing is not None
        group = dist.new_group(backend="gloo")  # for the host, also where ranks compute on CUDA devices
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._checkpoints = Checkpoints(job, state, group, partial(_append, files.checkpoints) if leads else _ignore)
        self._losses = _LossLog(Path(job.checkpointing.folder), group) if job.fewer_nodes else None
        self._every, self._stop = job.checkpointing.every, stop
        stop.can_stop = True

    def restore(self) -> int:
        """Reads the newest checkpoint, as ``Checkpoints.restore``."""
        return self._checkpoints.restore()

    def after(self, step: int, losses: list[float], recorder: Recorder, *, is_last: bool) -> None:
        """Saves the state if due after a step, and stops this rank if any rank got a request to stop.

        Args:
            step: Number of steps done.
            losses: Losses of the last step on this rank; none on ranks without the last stage.
            recorder: Gets the cause of waiting.
            is_last: The training is done.

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
            self._checkpoints.take(step)
        if is_last or not self._is_any_told():
            return
        recorder.waiting("taking a checkpoint before stopping", step)
        if self._losses is not None:
            self._losses.gather()
        if not is_due:
            self._checkpoints.take(step)
        if self._stop.is_told(_SIGNAL_S):
            raise SystemExit(143)
        raise PeerStoppedError(f"ranks of another node were told to stop after step {step}")

    def _is_any_told(self) -> bool:
        told = torch.tensor([int(self._stop.is_told())])
        dist.all_reduce(told, dist.ReduceOp.MAX, self._group)
        return bool(told)


class _LossLog:
    """Losses of all steps that a resumed run does not repeat, gathered before each checkpoint.

    Args:
        folder: Checkpoint folder, shared by all nodes, since rank 0 may move to another node. It gets one JSON line
            ``{step, loss}`` per step, with the mean over ranks and microbatches.
        group: All ranks.
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


def _append(file: Path, timing: CheckpointTiming) -> None:
    with file.open("a") as stream:
        stream.write(timing.model_dump_json() + "\n")


def _ignore(timing: CheckpointTiming) -> None:
    """Does nothing: the times of rank 0 represent all ranks."""
