"""Takes checkpoints between two steps, with torch.distributed.checkpoint, and goes on from them.

Every rank writes its own parts; what several hold is written once. A checkpoint that cannot be written, for instance
because the disk is full, is told and passed over: training goes on, and the one before it stays.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from executor.train.checkpoint_folder import WholeWriter, drop_unfinished, newest_checkpoint, prune, step_folder
from executor.train.training_state import TrainingState
from simplan.errors import RunError
from simplan.program.checkpoint import CheckpointTiming
from simplan.program.run_spec import RunSpec
from simplan.units import format_bytes

__all__ = ["Checkpoints"]

_APPEARS_S = 10.0  # for what one node has written to show on the others, which may remember what a folder held


class Checkpoints:
    """The checkpoints of one rank's run; every rank of the job must make one and call the same methods.

    Args:
        job: The job, with ``checkpointing``.
        state: What is kept.
        tell: Called with what each took, on every rank.
    """

    def __init__(self, job: RunSpec, state: TrainingState, tell: Callable[[CheckpointTiming], None]) -> None:
        assert job.checkpointing is not None
        self._job, self._asked = job, job.checkpointing
        self._folder = Path(self._asked.folder)
        self._state = state
        self._group = dist.new_group(backend="gloo")  # the state of CUDA ranks is described on the host
        self._taken = 0  # the last step of which one was tried
        self._tell = tell
        if dist.get_rank() == 0:
            drop_unfinished(self._folder)
        self._see_that_it_is_shared()

    def _see_that_it_is_shared(self) -> None:
        """Rank 0 would take its own files for the whole of a checkpoint.

        Raises:
            RunError: This rank does not see what rank 0 writes.
        """
        leads = dist.get_rank() == 0
        mark = self._folder / f".seen-by-all-{os.getpid()}"
        if leads:
            mark.touch()
        told = [mark]
        dist.broadcast_object_list(told, src=0, group=self._group)
        deadline_s = time.monotonic() + _APPEARS_S
        while not told[0].exists():
            if time.monotonic() > deadline_s:
                raise RunError(f"{self._folder} is not the folder that rank 0 has; name one that all nodes share")
            time.sleep(0.1)
        dist.barrier(self._group)
        if leads:
            mark.unlink()

    def restore(self) -> int:
        """Takes over the newest whole checkpoint; gives the steps it has done, 0 when there is none.

        Raises:
            RunError: This rank does not see what rank 0 sees.
        """
        found: list[int] = [0]
        if dist.get_rank() == 0:
            header, _ = newest_checkpoint(self._folder)
            found = [0 if header is None else header.step]
        dist.broadcast_object_list(found, src=0, group=self._group)
        (step,) = found
        if step == 0:
            return 0
        path = step_folder(self._folder, step)
        if not path.is_dir():
            raise RunError(f"{path} is not here, but rank 0 has it: the folder must be one that all nodes share")
        self._state.restore(FileSystemReader(path), self._group)
        return step

    def after(self, step: int) -> None:
        """To be called when a number of steps are done: takes a checkpoint when it is time for one."""
        if step % self._asked.every == 0:
            self.take(step)

    def take(self, step: int) -> None:
        """Takes one of a number of steps, unless there is one; older ones go when it is whole.

        What is passed over is what all ranks have told each other. When they cannot, a rank is gone, and the run ends.
        """
        if self._taken == step:
            return
        self._taken = step
        start_s, failure = time.perf_counter(), None
        writer = WholeWriter(self._folder, self._job, step)
        try:
            save(self._state.tensors(), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            failure = _why(error, self._folder)
        if dist.get_rank() == 0:
            if failure is None:
                prune(self._folder, self._asked.keep)
            else:
                shutil.rmtree(writer.unfinished, ignore_errors=True)
        self._tell(CheckpointTiming(step=step, written_s=time.perf_counter() - start_s, failure=failure))


def _why(error: CheckpointException, folder: Path) -> str:
    """The first rank's reason, in words, and the room that half of a checkpoint has left."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
    return f"rank {rank}: {_words(cause)}; {format_bytes(shutil.disk_usage(folder).free)} are free there"


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    if "inline_container" in text:  # torch's own writer, when a write to its file was cut short
        return "a file could not be written to its end"
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
