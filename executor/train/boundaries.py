"""Boundaries of layers: points in a pass at which a slow rank computes longer, and a late replica leaves its step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from executor.models.model import Stage


class LayerBoundaries:
    """Boundaries of the layers of a rank: before the forward of each layer, and after each gradient.

    A slow rank computes between two boundaries, then keeps its core busy until that has taken longer by its slowdown.
    Only CPU time of the computing thread counts, without waits for other ranks.

    Args:
        slowdown: Time of this rank's kernels over that of the other ranks; 1 for none.
        leave: Called at every boundary; may raise to end the passes.
    """

    def __init__(self, slowdown: float, leave: Callable[[], None]) -> None:
        self._slowdown, self._leave = slowdown, leave
        self._mark_s = 0.0

    def watch(self, stage: Stage) -> None:
        """Adds the hooks to a stage."""

        def reached(*_: Any) -> None:
            self.compute_longer(self._leave)

        for layer in stage.layers.values():
            layer.register_forward_pre_hook(reached)
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(reached)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begins to count: what the thread has done until now is no compute of the model."""
        self._mark_s = time.thread_time()

    def compute_longer(self, leave: Callable[[], None] = lambda: None) -> None:
        """Slows down what was computed since the last boundary."""
        leave()
        end_s = time.thread_time() + (self._slowdown - 1) * (time.thread_time() - self._mark_s)
        while time.thread_time() < end_s:
            leave()
        self.begin()
