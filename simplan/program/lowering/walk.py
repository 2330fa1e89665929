"""A rank walks its row: which template follows which, and what each of them may wait for.

This is a finite automaton. Its states are shapes of the state of a rank (``simplan.program.lowering.stamping``), its
input the actions of the row, and with every template that is lowered it learns where one more of them leads. Long rows
are walked in machine code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALL_SENT", "ActionTemplate", "Integers", "Walked", "Walker"]

Integers = NDArray[np.int64]
ALL_SENT = -2
"""OPTIM needs all that the rank has sent."""
_LONG_ROW = 5_000
"""Actions from which on the interpreter (10 microseconds for each, in many rows) is slower than importing numba."""
_MOST_NEEDED = 4
"""One more than the messages that a forward or backward ever needs."""
_ACTION, _NEEDS, _TEMPLATE, _BEGINS, _INPUTS = range(5)  # of an action of a row
_FIRST, _NUM_OPS, _NEXT_SHAPE, _ITEMS, _NUM_NEXT, _NUM_RECEIVED, _NUM_SENT, _SENT_BYTES, _EARLIER, _CODE = range(10)


class ActionTemplate(NamedTuple):
    """An action as it is lowered in one state of its rank.

    Attributes:
        first: Where its rows begin among all rows of the builder.
        num_ops: Its operations.
        next_shape: Shape of the state that it leaves.
        next_indices: Indices of that state: relative ones, or symbols of the state before.
        received: Operations among these that receive something for the forward or backward that follows.
        sent: Those that send something.
        sent_bytes: What sending holds until the end of the step.
    """

    first: int
    num_ops: int
    next_shape: int
    next_indices: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    sent_bytes: int


class Walked(NamedTuple):
    """A row that was walked.

    Attributes:
        first: ``(actions,)`` Where the rows of its template begin.
        num_ops: ``(actions,)`` Operations.
        inputs: Operations that they may wait for, action by action.
        num_inputs: ``(actions,)`` How many of these each has.
    """

    first: Integers
    num_ops: Integers
    inputs: Integers
    num_inputs: Integers


class Walker:
    """The automaton of a rank and of all ranks that are alike."""

    def __init__(self) -> None:
        # By template: numbers of an ``ActionTemplate``, whose indices are so many of ``_items`` from one on, then the
        # template that was lowered before it in the same state, and its action with the messages that it needs.
        self._templates = np.zeros((64, 10), np.int64)
        self._items = np.zeros(256, np.int64)
        self._num_templates = self._num_items = 0
        self._latest = np.full(64, -1)  # by shape, the last template that was lowered in it
        self._longest = 1  # most indices that a state has
        self._ends: dict[tuple[int, int, int, int], int] = {}  # templates of what needs all that was sent

    def run(
        self,
        actions: Integers,
        needs: Integers,
        start: tuple[int, int],
        lowered: Callable[[int, int, int, int], ActionTemplate],
    ) -> Walked:
        """Walks a row.

        Args:
            actions: ``(actions,)`` Numbers from 0 on; equal ones become the same operations in the same state.
            needs: ``(actions,)`` Where in the row an action receives what it needs, ``ALL_SENT``, or -1 for nothing.
            start: Shape of the state before the row, which has no indices, and index of the first operation.
            lowered: Makes a template of an action, given its place in the row, the shape of the state, of how many
                messages it needs something, and what sending holds.
        """
        count = len(actions)
        row = np.stack([actions, needs, *np.zeros((3, count), np.int64)])
        inputs, state = np.empty(16 * count + 64, np.int64), np.empty(self._longest, np.int64)
        at = np.array([0, start[0], 0, start[1], 0])  # actions walked, shape, inputs used, operations, length of state
        walk = _compiled() if "numba" in sys.modules or count >= _LONG_ROW else _walk
        while True:
            state = state if len(state) >= self._longest else np.resize(state, self._longest)
            walk(row, inputs, state, at, self._latest, self._templates, self._items)
            place, shape, used, ops, held = at.tolist()
            if place == count:
                break
            action, needed = row[:_TEMPLATE, place].tolist()
            if used + held + _MOST_NEEDED > len(inputs):
                inputs = np.concatenate([inputs, np.empty_like(inputs)])
            elif needed != ALL_SENT:
                num_needed = int(self._templates[row[_TEMPLATE, needed], _NUM_RECEIVED]) if needed >= 0 else 0
                self._add(lowered(place, shape, num_needed, 0), shape, action * _MOST_NEEDED + num_needed)
            else:
                taken = self._templates[row[_TEMPLATE, :place]]
                given, sent_bytes = self._all_sent(taken, row[_BEGINS, :place]), int(taken[:, _SENT_BYTES].sum())
                key = shape, action, len(given), sent_bytes
                if key not in self._ends:
                    self._ends[key] = self._add(lowered(place, shape, len(given), sent_bytes))
                number = self._ends[key]
                given = np.concatenate([state[:held], given])
                row[_TEMPLATE:, place] = number, ops, used
                inputs = np.concatenate([inputs[:used], given, np.empty(16 * (count - place) + 64, np.int64)])
                state = self._after(number, given, ops)
                template = self._templates[number]
                at[:] = place + 1, template[_NEXT_SHAPE], used + len(given), ops + template[_NUM_OPS], len(state)
        taken = self._templates[row[_TEMPLATE]]
        return Walked(taken[:, _FIRST], taken[:, _NUM_OPS], inputs[:used], np.diff(row[_INPUTS], append=used))

    def _add(self, template: ActionTemplate, shape: int = 0, code: int = -1) -> int:
        """Adds a template; from now on an action with a code leads from a state to it."""
        number, begin = self._num_templates, self._num_items
        *numbers, nexts, received, sent, sent_bytes = template
        items = (*nexts, *received, *sent)
        self._num_templates, self._num_items = number + 1, begin + len(items)
        self._longest = max(self._longest, len(nexts))
        self._templates, self._items = _with_room(self._templates, number), _with_room(self._items, self._num_items)
        self._items[begin : self._num_items] = items
        self._latest = _with_room(self._latest, shape)
        earlier = -1
        if code >= 0:
            earlier, self._latest[shape] = self._latest[shape], number
        self._templates[number] = *numbers, begin, len(nexts), len(received), len(sent), sent_bytes, earlier, code
        return number

    def _all_sent(self, taken: Integers, begins: Integers) -> Integers:
        """Indices of all sends of some actions, in order."""
        counts = taken[:, _NUM_SENT]
        of = np.repeat(np.arange(len(taken)), counts)
        first = (taken[:, _ITEMS] + taken[:, _NUM_NEXT] + taken[:, _NUM_RECEIVED] - (np.cumsum(counts) - counts))[of]
        return begins[of] + self._items[first + np.arange(len(of))]

    def _after(self, number: int, given: Integers, ops: int) -> Integers:
        """The state after a template with these inputs."""
        begin, num_next = self._templates[number, [_ITEMS, _NUM_NEXT]]
        nexts = self._items[begin : begin + num_next]
        return np.array([ops + index if index >= 0 else given[-1 - index] for index in nexts.tolist()], np.int64)


def _with_room(array: Integers, place: int) -> Integers:
    """The array, or a larger one that has a place."""
    if place < len(array):
        return array
    return np.concatenate([array, np.full((place + 1, *array.shape[1:]), -1)])


def _walk(
    row: Integers,
    inputs: Integers,
    state: Integers,
    at: Integers,
    latest: Integers,
    templates: Integers,
    items: Integers,
) -> None:
    """Takes templates until one is not known yet, all that was sent is needed, or there is no more room."""
    place, shape, used, ops, held = at
    while place < row.shape[1] and used + held + _MOST_NEEDED <= len(inputs):
        needed, end = row[_NEEDS, place], used + held
        if needed == ALL_SENT:
            break
        inputs[used:end] = state[:held]
        if needed >= 0:
            sender = row[_TEMPLATE, needed]
            first = templates[sender, _ITEMS] + templates[sender, _NUM_NEXT]
            for index in range(first, first + templates[sender, _NUM_RECEIVED]):
                inputs[end] = row[_BEGINS, needed] + items[index]
                end += 1
        code = row[_ACTION, place] * _MOST_NEEDED + end - used - held
        number = latest[shape] if shape < len(latest) else -1
        while number >= 0 and templates[number, _CODE] != code:
            number = templates[number, _EARLIER]
        if number < 0:
            break
        row[_TEMPLATE, place], row[_BEGINS, place], row[_INPUTS, place] = number, ops, used
        first, held = templates[number, _ITEMS], templates[number, _NUM_NEXT]
        for nth in range(held):
            index = items[first + nth]
            state[nth] = ops + index if index >= 0 else inputs[used - 1 - index]
        shape, used, ops, place = templates[number, _NEXT_SHAPE], end, ops + templates[number, _NUM_OPS], place + 1
    at[0], at[1], at[2], at[3], at[4] = place, shape, used, ops, held


@cache
def _compiled() -> Callable[..., None]:
    from simplan.jit import jit  # imports numba

    return jit(_walk)
