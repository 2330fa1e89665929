"""Ranks that are to stop before the training is done: after the same step on all of them, with a checkpoint of it.

torchrun asks ranks to end (SIGTERM) where its node is told to leave or other nodes come. They tell each other between
two steps, so that a signal on one node stops all of them, and nobody is left in the middle of a collective.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from executor.launch.rank import StopRequest
from simplan.errors import RunError

__all__ = ["PeerStoppedError", "Stopping"]

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
