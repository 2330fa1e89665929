"""What a training keeps of itself between two steps, so that others can go on: checkpoints, and losses with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from executor.checkpoints import Checkpoints
from executor.loss_log import LossLog
from executor.rank import RankFiles
from executor.recorder import Recorder
from executor.stopping import StopRequests
from executor.training_state import TrainingState
from simplan.program.checkpoint import CheckpointTiming
from simplan.program.run_spec import RunSpec

__all__ = ["Keeper"]


class Keeper:
    """Of one rank; every rank of the job must make one and call the same methods.

    Args:
        job: The job, with ``checkpointing``.
        state: What is kept.
        files: Of this rank.
        stop: File that asks this rank's node to stop; heeded where a job may go on with other nodes.
        leads: Whether this is rank 0, which writes down what all need to know.
    """

    def __init__(self, job: RunSpec, state: TrainingState, files: RankFiles, stop: Path, *, leads: bool) -> None:
        assert job.checkpointing is not None
        self._checkpoints = Checkpoints(job, state, partial(_append, files.checkpoints) if leads else _ignore)
        self._losses = LossLog(files.losses, job.checkpointing.every) if job.fewer_nodes else None
        self._stop = StopRequests(stop) if job.fewer_nodes else None

    def restore(self) -> int:
        """As ``Checkpoints.restore``."""
        return self._checkpoints.restore()

    def after(self, step: int, losses: list[float], recorder: Recorder, *, is_last: bool) -> bool:
        """To be called when a number of steps are done.

        Args:
            step: How many.
            losses: Of the last one, on this rank.
            recorder: Told what is waited for.
            is_last: Whether the training is done.

        Returns:
            Whether ranks are to stop here; there is a checkpoint of these steps then, unless it could not be written.
        """
        if self._losses is not None:
            recorder.waiting("gathering losses", step)
            self._losses.add(step - 1, losses)
        recorder.waiting("taking a checkpoint", step)
        self._checkpoints.after(step)
        if is_last:
            recorder.waiting("waiting for the last checkpoint to be written", step)
            self._checkpoints.finish()
            return False
        if self._stop is None or not self._stop.any():
            return False
        assert self._losses is not None
        recorder.waiting("taking a checkpoint before other nodes go on", step)
        self._losses.gather()
        self._checkpoints.take_and_finish(step)
        return True


def _append(file: Path, timing: CheckpointTiming) -> None:
    with file.open("a") as stream:
        stream.write(timing.model_dump_json() + "\n")


def _ignore(timing: CheckpointTiming) -> None:
    """Other ranks than 0 took about as long."""
