"""Which forwards and backwards of a rank are computed together, each beside the other's exchanges for experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from simplan.program.action import Action, ActionKind

__all__ = ["pairs"]

_COMPUTING = (ActionKind.FORWARD, ActionKind.BACKWARD)


def pairs(row: Sequence[Action]) -> frozenset[Action]:
    """Whole backwards and the forwards that come right after them, of other microbatches, in the order of a rank.

    Those before the first backward and after the last forward have no partner (NVIDIA/Megatron-LM, combined_1f1b in
    megatron/core/pipeline_parallel).

    Args:
        row: Actions of the rank.
    """
    computing = [action for action in row if action.kind in _COMPUTING]
    found: set[Action] = set()
    for one, other in pairwise(computing):
        if one.kind is ActionKind.BACKWARD and other.kind is ActionKind.FORWARD:
            found |= {one, other}
    return frozenset(found)
