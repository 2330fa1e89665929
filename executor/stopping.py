"""Ranks that are to stop before the training is done: after the same step on all of them, with a checkpoint of it.

A node that is told to leave, and node 0 when it lets others in, ask their own ranks by a file. Ranks look for it
between two steps and tell each other, so that a file on one node stops all of them, and nobody is left in the middle of
a collective.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["StopRequests", "stop_file"]


def stop_file(out_dir: Path, first_rank: int) -> Path:
    """The file that asks the ranks of a node to stop; nodes may share a file system.

    Args:
        out_dir: Folder of the run.
        first_rank: Of the node.
    """
    return out_dir / f"stop.rank{first_rank}"


class StopRequests:
    """One rank's view; every rank of the job must make one and call the same methods.

    Args:
        file: Of this rank's node.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._group = dist.new_group(backend="gloo")  # of its own, also where ranks compute on CUDA devices

    def any(self) -> bool:
        """Whether some rank is asked to stop: the same on all."""
        asked = torch.tensor([int(self._file.exists())])
        dist.all_reduce(asked, dist.ReduceOp.MAX, self._group)
        return bool(asked)
