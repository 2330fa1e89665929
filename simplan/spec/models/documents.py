"""Attention of sequences that several documents share: a call of the kernel for each, whose results are then joined."""

from __future__ import annotations

from simplan.spec.layer import Kernel, Pointwise, Saved
from simplan.spec.share import Share

__all__ = ["join_kernels", "join_saved"]


def join_kernels(elements: int, share: Share) -> list[Kernel]:
    """Outputs of documents are copied into one tensor; backward does as much for gradients of q, k and v.

    Args:
        elements: Of the output of one sequence.
        share: Sizes, and the documents.
    """
    return [Pointwise("join documents", elements, elements)] if share.documents else []


def join_saved(elements: int, share: Share) -> list[Saved]:
    """The kernel keeps its own outputs beside the joined one, which the projection keeps; arguments as above."""
    return [Saved("outputs of documents", elements, made_by="attention")] if share.documents else []
