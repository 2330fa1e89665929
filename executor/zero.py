"""ZeRO-1: every rank of a group updates its part of the parameters and hands it to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.groups import Group
from executor.recorder import Recorder
from executor.streamed_optimizer import StreamedOptimizer
from simplan.program.partition_states import partition_states

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer:
    """An optimizer whose states are split over a group (Rajbhandari et al. 2020, stage 1).

    Parameters are dealt out whole (``partition_states``). Those of one owner are views of one buffer, so that each
    owner hands out its updates with a single broadcast.

    Args:
        parameters: What is trained; their memory is moved.
        group: Ranks that hold equal parameters and gradients.
        make: Makes the optimizer of some parameters.
        recorder: Gets the broadcasts.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer | StreamedOptimizer],
        recorder: Recorder,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._recorder = recorder
        owners = partition_states([p.numel() for p in self._parameters], len(group.ranks))
        parts: list[list[nn.Parameter]] = [[] for _ in group.ranks]
        for parameter, owner in zip(self._parameters, owners, strict=True):
            parts[owner].append(parameter)
        self._buffers = [_pack(part) for part in parts]
        mine = parts[group.ranks.index(dist.get_rank())]
        self._inner = make(mine) if mine else None  # more ranks than parameters: some have nothing to update

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer | StreamedOptimizer, ...]:
        """Of the parameters this rank owns."""
        return () if self._inner is None else (self._inner,)

    @property
    def state(self) -> dict[Any, Any]:
        """States by parameter, as torch's optimizers have them."""
        return {} if self._inner is None else dict(self._inner.state)

    def step(self) -> None:
        """Updates the parameters this rank owns."""
        if self._inner is not None:
            self._inner.step()

    def broadcast(self) -> None:
        """Hands round all updates, owner by owner; an owner of nothing has nothing to send."""
        for owner, buffer in zip(self._group.ranks, self._buffers, strict=True):
            if buffer is None:
                continue
            ranks = (owner, *(rank for rank in self._group.ranks if rank != owner))
            handle = self._recorder.issue("broadcast", ranks, buffer.nbytes)
            dist.broadcast(buffer, src=owner, group=self._group.handle)
            self._recorder.complete(handle)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """As torch's optimizers, for the parameters of all owners."""
        assert not set_to_none
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()


def _pack(parameters: list[nn.Parameter]) -> Tensor | None:
    """Moves parameters into one buffer, in order."""
    if not parameters:
        return None
    buffer = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(buffer, [p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return buffer
