"""What a training keeps of itself between two steps, so that others can go on: checkpoints, and losses with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from executor.checkpoints import Checkpoints
from executor.launch.rank import RankFiles, StopRequest
from executor.loss_log import LossLog
from executor.recorder import Recorder
from executor.stopping import Stopping
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
        if is_last:
            recorder.waiting("waiting for the last checkpoint to be written", step)
            self._checkpoints.finish()
        elif self._stopping.any():
            recorder.waiting("taking a checkpoint before stopping", step)
            if self._losses is not None:
                self._losses.gather()
            self._checkpoints.take_and_finish(step)
            self._stopping.leave(step)


def _append(file: Path, timing: CheckpointTiming) -> None:
    with file.open("a") as stream:
        stream.write(timing.model_dump_json() + "\n")


def _ignore(timing: CheckpointTiming) -> None:
    """Other ranks than 0 took about as long."""
