"""Rows of an action table in lowering order, with the variant of each action and the operations that it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from simplan.program.action import Action, ActionKind
from simplan.program.lowering.walk import ALL_SENT, Integers
from simplan.program.tables.complete import last_backwards

_NOTHING = -1
_K = ActionKind
_COMPUTING = (_K.FORWARD, _K.BACKWARD)


class ActionVariant(NamedTuple):
    """Actions of a row that differ only in their microbatch.

    Attributes:
        action: One of the actions.
        is_first: True for the first forward of its stage.
        is_last: True if the action completes the gradients of its stage.
        is_paired: True if the action is computed together with another one (``paired_actions``).
        receives: True if the action issues its own receive, because the host waits for every P2P transfer.
    """

    action: Action
    is_first: bool
    is_last: bool
    is_paired: bool
    receives: bool

    def at_stage(self, leading: Mapping[int, int]) -> ActionVariant:
        """Returns the variant at the corresponding stage."""
        action = self.action
        return self._replace(action=action._replace(stage=leading.get(action.stage, action.stage)))


class RankRow(NamedTuple):
    """The actions of a row in the order in which they are lowered.

    Attributes:
        stage, microbatch: ``(actions,)`` Stage and microbatch of each action; -1 for no microbatch.
        variant: ``(actions,)`` Index into ``variants``.
        needs: ``(actions,)`` See ``Walker.run``.
    """

    actions: tuple[Action, ...]
    stage: Integers
    microbatch: Integers
    variant: Integers
    needs: Integers
    variants: list[ActionVariant]


class _Row:
    """A row compared and hashed by identity: rows are long to hash, and plans share tables."""

    def __init__(self, row: Sequence[Action]) -> None:
        self.row = tuple(row) if not isinstance(row, tuple) else row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Row) and self.row is other.row

    def __hash__(self) -> int:
        return id(self.row)


def row_of_actions(row: Sequence[Action], *, synchronous: bool, overlaps_experts: bool) -> RankRow:
    """Returns the row of a rank in lowering order.

    Args:
        synchronous: True if the rank waits for every P2P transfer before it continues.
        overlaps_experts: True if forwards are computed together with backwards.
    """
    return _row(_Row(row), synchronous, overlaps_experts)


@lru_cache(maxsize=1024)
def _row(kept: _Row, synchronous: bool, overlaps_experts: bool) -> RankRow:
    row = kept.row
    last = set(last_backwards((row,)).values())
    paired = paired_actions(row) if overlaps_experts else frozenset()
    place: dict[Action | None, int] = {action: number for number, action in enumerate(row)}
    first = {action.stage: action for action in reversed(row) if action.kind is _K.FORWARD}
    entries: list[tuple[int, int, int, int]] = []
    variants: dict[Hashable, ActionVariant] = {}
    numbers: dict[Hashable, int] = defaultdict(count().__next__)
    for action in row:
        stage, kind, microbatch = action
        needed = ALL_SENT if kind is _K.OPTIM else place.get(action.receive, _NOTHING)
        receives = synchronous and needed >= 0
        variant = ActionVariant(action, first.get(stage) == action, action in last, action in paired, receives)
        key = (kind, stage, *variant[1:])
        variants.setdefault(key, variant)
        entries.append((stage, -1 if microbatch is None else microbatch, numbers[key], needed))
    stages, microbatches, which, needs = np.array(entries, np.int64).reshape(-1, 4).T
    return RankRow(row, stages, microbatches, which, needs, [*variants.values()])


def paired_actions(row: Sequence[Action]) -> frozenset[Action]:
    """Returns full backwards and the forwards of other microbatches that directly follow them in a rank's order.

    Actions before the first backward and after the last forward have no partner (NVIDIA/Megatron-LM, combined_1f1b in
    megatron/core/pipeline_parallel).
    """
    computing = [action for action in row if action.kind in _COMPUTING]
    actions: set[Action] = set()
    for one, other in pairwise(computing):
        if one.kind is ActionKind.BACKWARD and other.kind is ActionKind.FORWARD:
            actions |= {one, other}
    return frozenset(actions)
