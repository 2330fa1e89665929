"""Writes checkpoints between two steps with torch.distributed.checkpoint, and resumes from them.

Every rank writes its own shards; one rank writes what several hold. If a checkpoint cannot be written, for instance
because the disk is full, the run reports the failure and continues, and the previous checkpoint stays.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from executor.train.checkpoint_folder import AtomicWriter, drop_unfinished, newest_checkpoint, prune, step_folder
from executor.train.training_state import TrainingState
from simplan.errors import RunError
from simplan.runs.checkpoint import CheckpointTiming
from simplan.runs.run_spec import RunSpec
from simplan.units import format_bytes

__all__ = ["Checkpoints"]

_APPEARS_S = 10.0  # for new files to appear on other nodes, which may cache a folder's content


class Checkpoints:
    """Checkpoints of one rank; every rank of the job must make one and call the same methods.

    Args:
        job: The job, with ``checkpointing``.
        state: State of this rank.
        group: All ranks, for the host.
        tell: Called with the time of each checkpoint, on every rank.

    Raises:
        RunError: This rank does not see the files of rank 0.
    """

    def __init__(
        self, job: RunSpec, state: TrainingState, group: dist.ProcessGroup, tell: Callable[[CheckpointTiming], None]
    ) -> None:
        assert job.checkpointing is not None
        self._job, self._state, self._group, self._tell = job, state, group, tell
        self._folder, self._num_kept = Path(job.checkpointing.folder), job.checkpointing.keep
        if dist.get_rank() == 0:
            drop_unfinished(self._folder)
        self._check_that_ranks_share_the_folder()

    def _check_that_ranks_share_the_folder(self) -> None:
        """Otherwise rank 0 would take its own files for a complete checkpoint."""
        mark = Path(self._from_rank_0(str(self._folder / f".seen-by-all-{os.getpid()}")))
        if dist.get_rank() == 0:
            mark.touch()
        deadline_s = time.monotonic() + _APPEARS_S
        while not mark.exists():
            if time.monotonic() > deadline_s:
                raise RunError(f"{self._folder} is not the folder that rank 0 has; name one that all nodes share")
            time.sleep(0.1)
        dist.barrier(self._group)
        if dist.get_rank() == 0:
            mark.unlink()

    def restore(self) -> int:
        """Reads the newest complete checkpoint; returns the number of steps done, 0 if there is none.

        Raises:
            RunError: This rank does not see the files of rank 0.
        """
        header = newest_checkpoint(self._folder)[0] if dist.get_rank() == 0 else None
        step: int = self._from_rank_0(0 if header is None else header.step)
        if step == 0:
            return 0
        path = step_folder(self._folder, step)
        if not path.is_dir():
            raise RunError(f"{path} is not here, but rank 0 has it: the folder must be one that all nodes share")
        self._state.restore(FileSystemReader(path), self._group)
        return step

    def take(self, step: int) -> None:
        """Writes a checkpoint of a number of steps, and deletes old ones once it is complete.

        A failure is agreed on by all ranks. If they cannot agree, a rank is gone, and the run ends.
        """
        start_s, failure = time.perf_counter(), None
        writer = AtomicWriter(self._folder, self._job, step)
        try:
            save(self._state.tensors(), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            failure = _why(error, self._folder)
        if dist.get_rank() == 0:
            if failure is None:
                prune(self._folder, self._num_kept)
            else:
                shutil.rmtree(writer.unfinished, ignore_errors=True)
        self._tell(CheckpointTiming(step=step, written_s=time.perf_counter() - start_s, failure=failure))

    def _from_rank_0(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]


def _why(error: CheckpointException, folder: Path) -> str:
    """Cause on the first rank that failed, and free space of the disk with the incomplete checkpoint."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
    return f"rank {rank}: {_words(cause)}; {format_bytes(shutil.disk_usage(folder).free)} are free there"


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    if "inline_container" in text:  # torch's own writer, when a write to its file was cut short
        return "a file could not be written to its end"
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
