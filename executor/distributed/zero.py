"""ZeRO-1: every rank of a group updates its part of the parameters and hands it to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.distributed.mesh import Peers
from simplan.program.partition_states import partition_states

__all__ = ["SeparateOptimizers", "ShardedOptimizer"]


class ShardedOptimizer:
    """An optimizer whose states are split over a group (Rajbhandari et al. 2020, stage 1).

    Parameters are dealt out whole (``partition_states``). Those of one owner are views of one buffer, so that each
    owner hands out its updates with a single broadcast.

    Args:
        parameters: What is trained; their memory is moved.
        peers: Ranks that hold equal parameters and gradients.
        make: Makes the optimizer of some parameters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        peers: Peers,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._parameters = list(parameters)
        self._peers = peers
        owners = partition_states([p.numel() for p in self._parameters], peers.size)
        parts: list[list[nn.Parameter]] = [[] for _ in peers.ranks]
        for parameter, owner in zip(self._parameters, owners, strict=True):
            parts[owner].append(parameter)
        self._buffers = [_pack(part) for part in parts]
        mine = parts[peers.rank]
        self._inner = make(mine) if mine else None  # more ranks than parameters: some have nothing to update

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
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
        for owner, buffer in zip(self._peers.ranks, self._buffers, strict=True):
            if buffer is None:
                continue
            self._peers.broadcast(buffer, owner)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """As torch's optimizers, for the parameters of all owners."""
        assert not set_to_none
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()


_Optimizer = torch.optim.Optimizer | ShardedOptimizer


class SeparateOptimizers:
    """An optimizer of experts of which other ranks have others, and one of all else, whose states may be dealt out.

    Args:
        others: Of all but the experts.
        experts: Of the experts.
    """

    def __init__(self, others: _Optimizer, experts: _Optimizer) -> None:
        self._optimizers = (others, experts)

    @property
    def optimizers(self) -> tuple[_Optimizer, ...]:
        """Both."""
        return self._optimizers

    @property
    def state(self) -> dict[Any, Any]:
        """States by parameter, as torch's optimizers have them."""
        return {parameter: of for optimizer in self._optimizers for parameter, of in optimizer.state.items()}

    def step(self) -> None:
        """Updates all parameters."""
        for optimizer in self._optimizers:
            optimizer.step()

    def broadcast(self) -> None:
        """As of ``ShardedOptimizer``."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.broadcast()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """As torch's optimizers."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def _pack(parameters: list[nn.Parameter]) -> Tensor | None:
    """Moves parameters into one buffer, in order."""
    if not parameters:
        return None
    buffer = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(buffer, [p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return buffer
