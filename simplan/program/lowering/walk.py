"""Rows of an action table in lowering order, and walks of ranks along them: templates, and operations that they need.

The walk is a finite automaton. Its states are shapes of the rank's state (``simplan.program.lowering.stamping``), its
input the actions of the row. An action sees the state common to all stages of the rank, and that of its own stage. Each
newly lowered template adds a transition. Long rows are walked in compiled code.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.model.layer import MAX_BOUNDARY_TENSORS
from simplan.program.action import Action, ActionKind
from simplan.program.tables.complete import last_backwards

Integers = NDArray[np.int64]
ALL_SENT = -2
"""Marks OPTIM, which needs all sends of the rank."""
_LONG_ROW = 5_000
"""Actions per row from which the interpreter (10 microseconds each, for many rows) is slower than importing numba."""
_MAX_NEEDED = MAX_BOUNDARY_TENSORS + 1
"""Maximum number of P2P transfers that a forward or backward needs, plus one."""
_ACTION, _NEEDS, _STAGE, _TEMPLATE, _BEGINS, _INPUTS = range(6)  # of an action of a row
(
    _FIRST,
    _NUM_OPS,
    _NEXT_SHAPE,
    _NEXT_OF_STAGE,
    _ITEMS,
    _NUM_NEXT,
    _NUM_OWN_NEXT,
    _NUM_RECEIVED,
    _NUM_SENT,
    _SENT_BYTES,
    _EARLIER,
    _CODE,
) = range(12)  # of a template
_SHAPE, _HELD = range(2)  # of a stage, followed by the indices of its state
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


class ActionTemplate(NamedTuple):
    """Template of an action lowered in one state of its rank.

    Attributes:
        first: Index of its first row among all rows of the builder.
        next_shape: Number of the shape of the common state after the action.
        next_of_stage: Number of the shape of its stage's state after the action.
        next_indices: Indices in the common state: relative ones, or symbols of the states before.
        next_own_indices: Indices in the stage's state, likewise.
        received: Relative indices of receives for the forward or backward that follows.
        sent: Relative indices of sends.
        sent_bytes: Bytes held by sends until the end of the step.
    """

    first: int
    num_ops: int
    next_shape: int
    next_of_stage: int
    next_indices: tuple[int, ...]
    next_own_indices: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    sent_bytes: int


class RowWalk(NamedTuple):
    """The result of walking a row.

    Attributes:
        first: ``(actions,)`` Index of the first row of each action's template.
        inputs: Operations that actions may wait for, action by action.
        num_inputs: ``(actions,)`` Number of entries of ``inputs`` per action.
    """

    first: Integers
    num_ops: Integers
    inputs: Integers
    num_inputs: Integers


class Walker:
    """The automaton of a rank and of all ranks with the same work."""

    def __init__(self) -> None:
        # By template: the numbers of an ``ActionTemplate`` (its indices are a range of ``_items``), then the template
        # lowered before it in the same state, and a code of its action and the number of transfers that it needs.
        self._templates = np.zeros((64, 12), np.int64)
        self._items = np.zeros(256, np.int64)
        self._num_templates = self._num_items = 0
        self._latest = np.full((64, 8), -1)  # by shapes, the last template that was lowered in them
        self._longest = self._longest_own = 1  # maximum number of indices of a common state, and of a stage's
        self._ends: dict[tuple[int, int, int, int, int], int] = {}  # templates of actions that need all sends

    def run(
        self,
        actions: Integers,
        needs: Integers,
        stages: Integers,
        start: tuple[int, int, int],
        lowered: Callable[[int, int, int, int, int], ActionTemplate],
    ) -> RowWalk:
        """Walks a row.

        Args:
            actions: ``(actions,)`` Numbers from 0; equal numbers become the same operations in the same state.
            needs: ``(actions,)`` Position in the row of the receive that an action needs, ``ALL_SENT``, or -1 for none.
            stages: ``(actions,)`` Index of the action's stage among those of the rank.
            start: Numbers of the shapes of the initial states, common and of each stage, which have no indices, and
                index of the first operation.
            lowered: Returns the template of an action. Its arguments are the position in the row, the numbers of both
                shapes, the number of transfers needed, and the bytes held by sends.
        """
        count = len(actions)
        row = np.stack([actions, needs, stages, *np.zeros((3, count), np.int64)])
        inputs, state = np.empty(16 * count + 64, np.int64), np.empty(self._longest, np.int64)
        own = np.zeros((1 + stages.max(initial=0), _HELD + 1 + self._longest_own), np.int64)
        own[:, _SHAPE] = start[1]
        at = np.array([0, start[0], 0, start[2], 0])  # actions walked, shape, inputs used, operations, length of state
        walk = _compiled() if "numba" in sys.modules or count >= _LONG_ROW else _walk
        while True:
            state = state if len(state) >= self._longest else np.resize(state, self._longest)
            more = _HELD + 1 + self._longest_own - own.shape[1]
            own = own if more <= 0 else np.pad(own, ((0, 0), (0, more)))
            walk(row, inputs, state, own, at, self._latest, self._templates, self._items)
            place, shape, used, ops, held = at.tolist()
            if place == count:
                break
            action, needed, stage = row[:_TEMPLATE, place].tolist()
            of_stage, own_held = own[stage, : _HELD + 1].tolist()
            if used + held + own_held + _MAX_NEEDED > len(inputs):
                inputs = np.concatenate([inputs, np.empty_like(inputs)])
            elif needed != ALL_SENT:
                num_needed = int(self._templates[row[_TEMPLATE, needed], _NUM_RECEIVED]) if needed >= 0 else 0
                assert num_needed < _MAX_NEEDED, "or codes of two actions are equal"
                template = lowered(place, shape, of_stage, num_needed, 0)
                self._add(template, (shape, of_stage), action * _MAX_NEEDED + num_needed)
            else:
                taken = self._templates[row[_TEMPLATE, :place]]
                given, sent_bytes = self._all_sent(taken, row[_BEGINS, :place]), int(taken[:, _SENT_BYTES].sum())
                key = shape, of_stage, action, len(given), sent_bytes
                if key not in self._ends:
                    self._ends[key] = self._add(lowered(place, shape, of_stage, len(given), sent_bytes))
                number = self._ends[key]
                given = np.concatenate([state[:held], own[stage, _HELD + 1 :][:own_held], given])
                row[_TEMPLATE:, place] = number, ops, used
                inputs = np.concatenate([inputs[:used], given, np.empty(16 * (count - place) + 64, np.int64)])
                state = self._after(number, given, ops)
                entry = self._templates[number]
                at[:] = place + 1, entry[_NEXT_SHAPE], used + len(given), ops + entry[_NUM_OPS], len(state)
        taken = self._templates[row[_TEMPLATE]]
        return RowWalk(taken[:, _FIRST], taken[:, _NUM_OPS], inputs[:used], np.diff(row[_INPUTS], append=used))

    def _add(self, template: ActionTemplate, shapes: tuple[int, int] = (0, 0), code: int = -1) -> int:
        """Adds a template, and a transition to it from a state for actions with this code; returns its number."""
        number, begin = self._num_templates, self._num_items
        *numbers, nexts, own_nexts, received, sent, sent_bytes = template
        items = (*nexts, *own_nexts, *received, *sent)
        counts = len(nexts), len(own_nexts), len(received), len(sent)
        self._num_templates, self._num_items = number + 1, begin + len(items)
        self._longest, self._longest_own = max(self._longest, counts[0]), max(self._longest_own, counts[1])
        self._templates, self._items = _with_room(self._templates, number), _with_room(self._items, self._num_items)
        self._items[begin : self._num_items] = items
        more = [max(0, 1 + shape - size) for shape, size in zip(shapes, self._latest.shape, strict=True)]
        if any(more):  # doubled at least, as copies take time
            grown = [(0, max(num, size * (num > 0))) for num, size in zip(more, self._latest.shape, strict=True)]
            self._latest = np.pad(self._latest, grown, constant_values=-1)
        earlier = -1
        if code >= 0:
            earlier, self._latest[shapes] = self._latest[shapes], number
        self._templates[number] = *numbers, begin, *counts, sent_bytes, earlier, code
        return number

    def _all_sent(self, taken: Integers, begins: Integers) -> Integers:
        """Returns the indices of all sends of some actions, in order."""
        counts = taken[:, _NUM_SENT]
        of = np.repeat(np.arange(len(taken)), counts)
        before = taken[:, [_ITEMS, _NUM_NEXT, _NUM_OWN_NEXT, _NUM_RECEIVED]].sum(axis=1)
        first = (before - (np.cumsum(counts) - counts))[of]
        return np.asarray(begins[of] + self._items[first + np.arange(len(of))])

    def _after(self, number: int, given: Integers, ops: int) -> Integers:
        """Returns the common state after a template with these inputs."""
        begin, num_next = self._templates[number, [_ITEMS, _NUM_NEXT]]
        nexts = self._items[begin : begin + num_next]
        return np.array([ops + index if index >= 0 else given[-1 - index] for index in nexts.tolist()], np.int64)


def _with_room(array: Integers, place: int) -> Integers:
    """Returns the array, or a larger copy in which ``place`` is a valid index."""
    if place < len(array):
        return array
    return np.concatenate([array, np.full((place + 1, *array.shape[1:]), -1)])


def _walk(
    row: Integers,
    inputs: Integers,
    state: Integers,
    own: Integers,
    at: Integers,
    latest: Integers,
    templates: Integers,
    items: Integers,
) -> None:
    """Follows known templates until one is unknown, all sends are needed, or an array is full."""
    place, shape, used, ops, held = at
    while place < row.shape[1]:
        needed, stage = row[_NEEDS, place], row[_STAGE, place]
        own_held = own[stage, _HELD]
        end = used + held + own_held
        if needed == ALL_SENT or end + _MAX_NEEDED > len(inputs):
            break
        inputs[used : used + held] = state[:held]
        inputs[used + held : end] = own[stage, _HELD + 1 : _HELD + 1 + own_held]
        if needed >= 0:
            sender = row[_TEMPLATE, needed]
            first = templates[sender, _ITEMS] + templates[sender, _NUM_NEXT] + templates[sender, _NUM_OWN_NEXT]
            for index in range(first, first + templates[sender, _NUM_RECEIVED]):
                inputs[end] = row[_BEGINS, needed] + items[index]
                end += 1
        code = row[_ACTION, place] * _MAX_NEEDED + end - used - held - own_held
        of_stage, number = own[stage, _SHAPE], -1
        if shape < latest.shape[0] and of_stage < latest.shape[1]:
            number = latest[shape, of_stage]
        while number >= 0 and templates[number, _CODE] != code:
            number = templates[number, _EARLIER]
        if number < 0:
            break
        row[_TEMPLATE, place], row[_BEGINS, place], row[_INPUTS, place] = number, ops, used
        first, held, own_held = (
            templates[number, _ITEMS],
            templates[number, _NUM_NEXT],
            templates[number, _NUM_OWN_NEXT],
        )
        for nth in range(held + own_held):
            index = items[first + nth]
            value = ops + index if index >= 0 else inputs[used - 1 - index]
            if nth < held:
                state[nth] = value
            else:
                own[stage, _HELD + 1 + nth - held] = value
        own[stage, _SHAPE], own[stage, _HELD] = templates[number, _NEXT_OF_STAGE], own_held
        shape, used, ops, place = templates[number, _NEXT_SHAPE], end, ops + templates[number, _NUM_OPS], place + 1
    at[0], at[1], at[2], at[3], at[4] = place, shape, used, ops, held


@cache
def _compiled() -> Callable[..., None]:
    from simplan.jit import jit  # imports numba

    return jit(_walk)
