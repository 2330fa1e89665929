"""Gradients of the whole model scaled to a norm, whichever ranks they are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from executor.optimizers import Parts, local, squares
from executor.parallel import Peers

__all__ = ["GradientClipper"]

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class GradientClipper:
    """What torch.nn.utils.clip_grad_norm_ does, over all shards, tensor-parallel ranks and stages.

    Args:
        max_norm: Gradients with a larger norm are scaled to it.
        parameters: What this rank trains.
        copies: Those of them that another stage counts: the head's copy of a tied embedding.
        parts: Which ranks have other parts of them.
        pipeline: Ranks of the other stages.
    """

    def __init__(
        self,
        max_norm: float,
        parameters: Sequence[nn.Parameter],
        copies: Sequence[nn.Parameter],
        parts: Parts,
        pipeline: Peers,
    ) -> None:
        self._max_norm, self._parts, self._pipeline = max_norm, parts, pipeline
        self._parameters = list(parameters)
        left_out = {id(copy) for copy in copies}
        self._counted = [p for p in parameters if parts.counts(p) and id(p) not in left_out]

    @torch.no_grad()
    def clip(self) -> None:
        """Scales all gradients, also by 1, so that no device waits for the host to look."""
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        counted = [local(p.grad) for p in self._counted if p.grad is not None]
        total = squares(counted).sum(0, keepdim=True) if counted else gradients[0].new_zeros(1)
        self._parts.total(total)
        if self._pipeline.size > 1:
            self._pipeline.all_reduce(total)
        torch._foreach_mul_(gradients, (self._max_norm / (total[0].sqrt() + _EPSILON)).clamp(max=1.0))
