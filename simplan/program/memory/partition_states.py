"""Whole optimizer states dealt out to ranks (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["partition_states"]


def partition_states(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Owner of each parameter: the largest first, each to the rank that has least so far."""
    owners = [0] * len(sizes)
    filled = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = filled.index(min(filled))
        filled[owners[index]] += sizes[index]
    return owners
