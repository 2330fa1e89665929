"""ZeRO-1 with torch's ZeroRedundancyOptimizer, every broadcast recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from executor.distributed.mesh import Peers

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # functional optimizers of this package use torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Optimizer whose states are partitioned over a group; each owner broadcasts its parameters as one bucket.

    torch assigns parameters to ranks as ``simplan.program.memory.states`` does. A rank without parameters
    broadcasts a bucket of one FP32 number.

    Args:
        parameters: Trained parameters; torch moves them into buckets.
        peers: Ranks that hold equal parameters and gradients.
        make: Makes the optimizer of one rank's parameter groups.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        peers: Peers,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        self._peers = peers
        super().__init__(parameters, make, peers.group, parameters_as_bucket_view=True)  # type: ignore[arg-type]

    def _sync_params(self) -> None:
        """Called by torch at the end of ``step``; the trainer calls ``broadcast`` after the recorded span of OPTIM."""

    def broadcast(self) -> None:
        """Sends the updated parameters of each rank to all ranks."""
        (buckets,) = self._buckets  # of one device
        for owner, bucket in zip(self._peers.ranks, buckets, strict=True):
            self._peers.broadcast(bucket, owner)
