"""What a training keeps of itself between two steps, so that others can go on: checkpoints, and losses with them."""

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
from simplan.program.checkpoint import CheckpointTiming
from simplan.program.run_spec import RunSpec

__all__ = ["Keeper", "LossLog", "PeerStoppedError", "Stopping", "read_losses"]

_FILE = "losses.jsonl"


class LossLog:
    """Gathers losses before each checkpoint, so that all are known of the steps that are not done again.

    Every rank must make one and call the same methods.

    Args:
        folder: Of checkpoints, which all nodes share: rank 0 may be on another one later. Gets a JSON line ``{step,
            loss}`` for every step, with the mean over ranks and microbatches.
        every: Steps between checkpoints.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._file, self._every = folder / _FILE, every
        self._group = dist.new_group(backend="gloo")
        self._mine: dict[int, list[float]] = {}

    def add(self, step: int, losses: list[float]) -> None:
        """Of a step that is done (counted from 0): this rank's losses, none on ranks without the last stage."""
        self._mine[step] = losses
        if (step + 1) % self._every == 0:
            self.gather()

    def gather(self) -> None:
        """Writes down those that are not yet."""
        if not self._mine:
            return
        leads = dist.get_rank() == 0
        everybody: list[dict[int, list[float]]] | None = [{}] * dist.get_world_size() if leads else None
        dist.gather_object(self._mine, everybody, dst=0, group=self._group)
        if everybody is not None:
            means = {k: statistics.fmean(loss for theirs in everybody for loss in theirs[k]) for k in self._mine}
            with self._file.open("a") as stream:
                stream.writelines(json.dumps({"step": k, "loss": mean}) + "\n" for k, mean in means.items())
        self._mine.clear()


def read_losses(folder: Path) -> dict[int, float]:
    """Of every step that a folder of checkpoints knows of; half a line, whose writer was killed, is not."""
    file = folder / _FILE
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {entry["step"]: entry["loss"] for entry in map(json.loads, (x for x in lines if x.endswith("\n")))}


_SIGNAL_S = 5.0  # torchrun's agents see within a second that nodes come


class PeerStoppedError(RunError):
    """Ranks of another node were told to stop, and this node's torchrun is to start its own again without them."""


class Stopping:
    """One rank's view; every rank of the job must make one and call the same methods.

    Args:
        request: Of this rank.
    """

    def __init__(self, request: StopRequest) -> None:
        self._request = request
        request.can_stop = True
        self._group = dist.new_group(backend="gloo")  # of its own, also where ranks compute on CUDA devices

    def any(self) -> bool:
        """Whether some rank is told to stop: the same on all."""
        asked = torch.tensor([int(self._request.is_told())])
        dist.all_reduce(asked, dist.ReduceOp.MAX, self._group)
        return bool(asked)

    def leave(self, step: int) -> None:
        """Ends this rank, which has a checkpoint of so many steps.

        Raises:
            SystemExit: It was told to stop itself.
            PeerStoppedError: Only others were.
        """
        if self._request.is_told(_SIGNAL_S):
            raise SystemExit(143)
        raise PeerStoppedError(f"ranks of another node were told to stop after step {step}")


class Keeper:
    """Of one rank; every rank of the job must make one and call the same methods.

    Args:
        job: The job, with ``checkpointing``.
        state: What is kept.
        files: Of this rank.
        stop: Whether this rank is told to stop.
        leads: Whether this is rank 0, which writes down what all need to know.
    """

    def __init__(self, job: RunSpec, state: TrainingState, files: RankFiles, stop: StopRequest, *, leads: bool) -> None:
        assert job.checkpointing is not None
        self._checkpoints = Checkpoints(job, state, partial(_append, files.checkpoints) if leads else _ignore)
        self._losses = LossLog(Path(job.checkpointing.folder), job.checkpointing.every) if job.fewer_nodes else None
        self._stopping = Stopping(stop)

    def restore(self) -> int:
        """As ``Checkpoints.restore``."""
        return self._checkpoints.restore()

    def after(self, step: int, losses: list[float], recorder: Recorder, *, is_last: bool) -> None:
        """To be called when a number of steps are done.

        Args:
            step: How many.
            losses: Of the last one, on this rank.
            recorder: Told what is waited for.
            is_last: Whether the training is done.

        Raises:
            SystemExit, PeerStoppedError: As ``Stopping.leave``; there is a checkpoint of these steps, unless it could
                not be written.
        """
        if self._losses is not None:
            recorder.waiting("gathering losses", step)
            self._losses.add(step - 1, losses)
        recorder.waiting("taking a checkpoint", step)
        self._checkpoints.after(step)
        if not is_last and self._stopping.any():
            recorder.waiting("taking a checkpoint before stopping", step)
            if self._losses is not None:
                self._losses.gather()
            self._checkpoints.take(step)
            self._stopping.leave(step)


def _append(file: Path, timing: CheckpointTiming) -> None:
    with file.open("a") as stream:
        stream.write(timing.model_dump_json() + "\n")


def _ignore(timing: CheckpointTiming) -> None:
    """Other ranks than 0 took about as long."""
