"""A moment of a layer's forward or backward at which it could need most memory."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Moment"]


class Moment(NamedTuple):
    """Bytes beside what is kept at a moment at which a layer could need most.

    Attributes:
        workspace: Outputs, gradients of activations, temporaries, and what was computed again.
        logits: Logits, their copies and their gradients.
        gradients: Gradients of weights before they are added to the others.
    """

    workspace: int = 0
    logits: int = 0
    gradients: int = 0
