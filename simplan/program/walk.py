"""A rank walks its row: which template follows which, and what each of them may wait for.

This is a finite automaton. Its states are shapes of the state of a rank (``simplan.program.stamping``), its input the
actions of the row, and with every template that is lowered it learns where one more of them leads. Long rows are walked
in machine code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
_PLACE, _SHAPE, _USED, _OPS, _HELD = range(5)


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
        self._templates: list[ActionTemplate] = []
        self._longest = 0  # most indices that a state has
        self._num_ops, self._next_shape = _Growing(), _Growing()
        self._next, self._received = _Lists(), _Lists()
        # by shape the last template that was lowered in it; by template the one before, and its action and messages
        self._latest, self._earlier, self._codes = _Growing(), _Growing(), _Growing()
        self._ends: dict[tuple[int, int, int, int], int] = {}  # by the same and what sending holds

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
        template, begins, inputs_from = np.zeros((3, count), np.int64)
        inputs, state = np.empty(16 * count + 64, np.int64), np.empty(64, np.int64)
        at = np.array([0, start[0], 0, start[1], 0])  # actions walked, shape, inputs used, operations, length of state
        walk = _compiled() if "numba" in sys.modules or count >= _LONG_ROW else _walk
        while True:
            if len(state) < self._longest:
                state = np.resize(state, self._longest)
            walk(
                actions, needs, template, begins, inputs_from, inputs, state, at, self._latest.values,
                self._earlier.values, self._codes.values, self._num_ops.values, self._next_shape.values,
                self._next.first.values, self._next.values.values, self._received.first.values,
                self._received.values.values,
            )  # fmt: skip
            place, shape, used, _, held = at.tolist()
            if place == count:
                break
            action, room = int(actions[place]), len(inputs) - used - held - _MOST_NEEDED
            if needs[place] == ALL_SENT:
                given = np.concatenate([state[:held], self._all_sent(template[:place], begins)])
                sent_bytes = int(self._column("sent_bytes")[template[:place]].sum())
                key = shape, action, len(given), sent_bytes
                if key not in self._ends:
                    self._ends[key] = self._add(lowered(place, shape, len(given) - held, sent_bytes))
                inputs = np.concatenate([inputs[:used], given, np.empty(16 * (count - place) + 64, np.int64)])
                state = self._end(self._ends[key], given, (template, begins, inputs_from), at)
            elif room < 0:
                inputs = np.concatenate([inputs, np.empty_like(inputs)])
            else:
                num_needed = len(self._templates[template[needs[place]]].received) if needs[place] >= 0 else 0
                made = self._add(lowered(place, shape, num_needed, 0))
                self._leads(shape, action, num_needed, made)
        return Walked(
            self._column("first")[template],
            self._num_ops.values[template],
            inputs[:used],
            np.diff(inputs_from, append=used),
        )

    def _column(self, name: str) -> Integers:
        return np.array([getattr(each, name) for each in self._templates], np.int64)

    def _add(self, template: ActionTemplate) -> int:
        self._num_ops.extend([template.num_ops])
        self._next_shape.extend([template.next_shape])
        self._next.append(template.next_indices)
        self._received.append(template.received)
        self._templates.append(template)
        self._longest = max(self._longest, len(template.next_indices))
        return len(self._templates) - 1

    def _leads(self, shape: int, action: int, num_needed: int, template: int) -> None:
        """From now on an action leads from a state to a template."""
        self._latest.extend([-1] * (1 + shape - self._latest.size))
        self._earlier.extend([-1] * (template - self._earlier.size) + [int(self._latest.values[shape])])
        self._codes.extend([-1] * (template - self._codes.size) + [action * _MOST_NEEDED + num_needed])
        self._latest.values[shape] = template

    def _all_sent(self, templates: Integers, begins: Integers) -> Integers:
        sent = [
            begins[place] + index
            for place, number in enumerate(templates.tolist())
            for index in self._templates[number].sent
        ]
        return np.array(sent, np.int64)

    def _end(self, number: int, given: Integers, row: tuple[Integers, Integers, Integers], at: Integers) -> Integers:
        """Takes a template that needs all that was sent; gives the state after it."""
        template = self._templates[number]
        place = at[_PLACE]
        for column, value in zip(row, (number, at[_OPS], at[_USED]), strict=True):
            column[place] = value
        nexts = np.array(template.next_indices, np.int64)
        symbols = np.minimum(nexts, -1)
        state = np.where(nexts < 0, np.append(given, 0)[-1 - symbols], at[_OPS] + nexts)
        at += 1, template.next_shape - at[_SHAPE], len(given), template.num_ops, len(nexts) - at[_HELD]
        return np.append(state, 0)  # never empty


class _Growing:
    """Integers, in an array with room for more."""

    def __init__(self) -> None:
        self.values, self.size = np.full(64, -1), 0

    def extend(self, numbers: Sequence[int]) -> None:
        end = self.size + len(numbers)
        if end > len(self.values):
            self.values = np.concatenate([self.values, np.full(end, -1)])
        self.values[self.size : end] = numbers
        self.size = end


class _Lists:
    """Lists of integers, one after the other; ``first`` says where each begins, and the next one."""

    def __init__(self) -> None:
        self.first, self.values = _Growing(), _Growing()
        self.first.extend([0])

    def append(self, numbers: Sequence[int]) -> None:
        self.values.extend(numbers)
        self.first.extend([self.values.size])


def _walk(
    actions: Integers,
    needs: Integers,
    template: Integers,
    begins: Integers,
    inputs_from: Integers,
    inputs: Integers,
    state: Integers,
    at: Integers,
    latest: Integers,
    earlier: Integers,
    codes: Integers,
    num_ops: Integers,
    next_shape: Integers,
    next_first: Integers,
    next_indices: Integers,
    received_first: Integers,
    received: Integers,
) -> None:
    """Takes templates until one is not known yet, all that was sent is needed, or there is no more room."""
    place, shape, used, ops, held = at
    while place < len(actions) and needs[place] != ALL_SENT and used + held + _MOST_NEEDED <= len(inputs):
        inputs[used : used + held] = state[:held]
        needed, end = needs[place], used + held
        if needed >= 0:
            sender = template[needed]
            for index in range(received_first[sender], received_first[sender + 1]):
                inputs[end] = begins[needed] + received[index]
                end += 1
        code = actions[place] * _MOST_NEEDED + end - used - held
        number = latest[shape] if shape < len(latest) else -1
        while number >= 0 and codes[number] != code:
            number = earlier[number]
        if number < 0:
            break
        template[place], begins[place], inputs_from[place] = number, ops, used
        held = 0
        for place_of_index in range(next_first[number], next_first[number + 1]):
            index = next_indices[place_of_index]
            state[held] = ops + index if index >= 0 else inputs[used - 1 - index]
            held += 1
        shape, used, ops, place = next_shape[number], end, ops + num_ops[number], place + 1
    at[0], at[1], at[2], at[3], at[4] = place, shape, used, ops, held


@cache
def _compiled() -> Callable[..., None]:
    from simplan.jit import jit  # imports numba

    return jit(_walk)
