"""The row of a pipeline rank as its lowering walks it: what tells its actions apart, and what each of them needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simplan.program.action import Action, ActionKind
from simplan.program.lowering.walk import ALL_SENT, Integers
from simplan.program.tables.complete import last_backwards

__all__ = ["ActionVariant", "RankRow", "paired_actions", "row_of_actions"]

_NOTHING = -1
_K = ActionKind
_COMPUTING = (_K.FORWARD, _K.BACKWARD)
_RECV_OF = {_K.FORWARD: _K.RECV_F, _K.BACKWARD: _K.RECV_B, _K.BACKWARD_INPUT: _K.RECV_B}


class ActionVariant(NamedTuple):
    """Actions of a row that differ in nothing but their microbatch.

    Attributes:
        action: One of them.
        is_first: It is the first forward of its stage.
        is_last: It completes the gradients of its stage.
        is_paired: It is computed together with another one (``paired_actions``).
        receives: It receives what it needs itself, since the host waits for every message.
    """

    action: Action
    is_first: bool
    is_last: bool
    is_paired: bool
    receives: bool

    def at_stage(self, leading: Mapping[int, int]) -> ActionVariant:
        """The same at the stage that stands for its own."""
        action = self.action
        return self._replace(action=action._replace(stage=leading.get(action.stage, action.stage)))


class RankRow(NamedTuple):
    """The actions of a row in the order in which they are lowered.

    Attributes:
        actions: They.
        stage, microbatch: ``(actions,)`` Of each; -1 for no microbatch.
        variant: ``(actions,)`` Which of the variants it is.
        needs: ``(actions,)`` As of ``Walker.run``.
        variants: What tells actions apart, besides their microbatches.
    """

    actions: tuple[Action, ...]
    stage: Integers
    microbatch: Integers
    variant: Integers
    needs: Integers
    variants: list[ActionVariant]


class _Row:
    """A row that is the same only if it is the same object: long to hash, and plans share tables."""

    def __init__(self, row: Sequence[Action]) -> None:
        self.row = tuple(row) if not isinstance(row, tuple) else row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Row) and self.row is other.row

    def __hash__(self) -> int:
        return id(self.row)


def row_of_actions(row: Sequence[Action], *, synchronous: bool, overlaps_experts: bool) -> RankRow:
    """The row of a rank.

    Args:
        row: Of a complete table.
        synchronous: The rank waits for every message before it goes on.
        overlaps_experts: Forwards are computed together with backwards.
    """
    return _row(_Row(row), synchronous, overlaps_experts)


@lru_cache(maxsize=1024)
def _row(kept: _Row, synchronous: bool, overlaps_experts: bool) -> RankRow:
    row = kept.row
    last = set(last_backwards((row,)).values())
    paired = paired_actions(row) if overlaps_experts else frozenset()
    place = {action: number for number, action in enumerate(row)}
    entries: list[tuple[int, int, int, int]] = []
    variants: dict[tuple[ActionKind, int, bool, bool, bool, bool], int] = {}
    begun: set[int] = set()
    listed: list[ActionVariant] = []
    for action in row:
        kind, stage, needs = action.kind, action.stage, _NOTHING
        receives = False
        if kind in _RECV_OF:
            needs = place.get(Action(stage, _RECV_OF[kind], action.microbatch), _NOTHING)
            receives = synchronous and needs >= 0
        elif kind is _K.OPTIM:
            needs = ALL_SENT
        is_first = kind is _K.FORWARD and stage not in begun
        begun |= {stage} if is_first else set()
        variant = ActionVariant(action, is_first, action in last, action in paired, receives)
        key = (kind, stage, *variant[1:])
        if key not in variants:
            variants[key] = len(listed)
            listed.append(variant)
        entries.append((stage, -1 if action.microbatch is None else action.microbatch, variants[key], needs))
    stage, microbatch, which, needed = np.array(entries, np.int64).reshape(-1, 4).T
    return RankRow(tuple(row), stage, microbatch, which, needed, listed)


def paired_actions(row: Sequence[Action]) -> frozenset[Action]:
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
