"""A stage of a pipeline, as a range of layers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Part"]


class Part(NamedTuple):
    """A stage.

    Attributes:
        start, stop: Its layers.
        receives: Its input comes from another rank.
        hands_on: Its output goes to another rank, from which comes its gradient.
        tied: It has the embedding and the head, which share a weight.
    """

    start: int
    stop: int
    receives: bool = False
    hands_on: bool = False
    tied: bool = False

    @property
    def layers(self) -> range:
        """Indices of its layers."""
        return range(self.start, self.stop)

    def ends(self, layer: int) -> tuple[bool, bool]:
        """Whether the input, and the gradient of the output, of a layer come from other ranks."""
        return self.receives and layer == self.start, self.hands_on and layer == self.stop - 1
