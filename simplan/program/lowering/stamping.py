"""Templates: actions lowered once and stamped for every microbatch.

The operations of an action depend on its kind and stage and on the state of its rank. The state records what the next
compute waits for, which units are unsharded, and which operations are pending. Two forwards of a stage in the same
state become the same operations, only later. Each action is therefore lowered once per state into an ``ActionTemplate``
with relative waits. A rank's row is then a list of templates (``simplan.program.lowering.walk``), which numpy expands
together (``ProgramBuilder.columns``).

The state of a rank is held by the objects that lower it: each names its changing attributes in ``STATE``, and hooks
those of the stage being lowered in ``STAGE_STATE``. Indices of operations (``OpIndex``) are extracted from the state.
The remainder, the *shape*, alone decides which template follows. While an action is lowered, indices are symbols: a
wait of -1 - k means the k-th index of the state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import GroupKind, RankGroup, RankMapping
from simplan.program.action import ActionKind
from simplan.program.lowering.walk import Integers, RowWalk
from simplan.program.program import ACTION_KINDS, Communication, MemoryEffect, OpColumns, OverlapRemainder, Work


class OpIndex(int):
    """Index of an operation: relative to the first operation of the action being lowered, or a negative symbol."""

    __slots__ = ()


StateAttribute = tuple[Any, str]
"""An object that lowers actions, and the name of one of its changing attributes."""


class RendezvousPoint(NamedTuple):
    """A collective or P2P transfer as seen from all its ranks.

    Attributes:
        what: The stream of a collective; for a P2P transfer its direction and number.
        ranks: Simulated ranks that take part.
    """

    what: Hashable
    ranks: RankGroup


class TemplateRow(NamedTuple):
    """One operation of a template; codes and indices as in ``OpColumns``.

    Attributes:
        has_microbatch: True if the operation's action names a microbatch.
        stage: Stage of the operation minus stage of the action being lowered.
        meeting: Index of the meeting; -1 for none.
        waits: Relative indices, or symbols.
    """

    stream: int
    kind: int
    name: int
    stage: int
    action: int
    has_microbatch: bool
    work: int
    memory: int
    meeting: int
    waits: tuple[int, ...]


class ProgramBuilder:
    """Builder of a Program from templates and the order in which ranks run them.

    Attributes:
        names: Name -> its number; see ``Program``.
        works: Work by number; see ``Program``.
        effects: Memory effects -> their number; see ``Program``.
        structures: Shapes of states by number.
        num_ops: Number of operations so far.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = defaultdict(count().__next__)
        self.works: list[tuple[Work, ...]] = []
        self._work_of: dict[int, int] = {}
        self.effects: dict[tuple[MemoryEffect, ...], int] = defaultdict(count(1).__next__, {(): 0})
        self._meetings: dict[RendezvousPoint, int] = {}
        self._met: list[RendezvousPoint] = []
        self._moved: dict[tuple[int, ...], int] = {}  # work and identity of its groups -> work of the rank
        self._moved_meetings: dict[tuple[int, int], int] = {}  # the same of meetings
        self._kept: dict[tuple[GroupKind, RankGroup], RankGroup] = {}  # groups, each as one object
        self._shapes: dict[Hashable, int] = {}
        self.structures: list[Hashable] = []
        self._rows: list[TemplateRow] = []
        self.restart()

    def restart(self) -> None:
        """Removes stamped operations, but keeps templates and names."""
        self.num_ops = 0
        self._ranks: list[_RankStart] = []
        self._stamped: list[tuple[Integers, ...]] = []  # by row, ``RowWalk`` and the stages and microbatches

    def start(self, rank: int, leader: int, mapping: RankMapping) -> None:
        """Assigns the following stamped operations to a rank.

        Args:
            leader: The rank of the templates.
            mapping: Mesh of the ranks.
        """
        self._ranks.append(_RankStart(self.num_ops, rank, leader, mapping, self._kept))

    def work(self, work: tuple[Work, ...]) -> int:
        """Returns the number of a tuple of work; each object has one number."""
        found = self._work_of.get(id(work))
        if found is None:  # work is long to hash; it is kept alive from here on, so that its identity stays unique
            found = self._work_of[id(work)] = len(self.works)
            self.works.append(work)
        return found

    def meeting(self, meeting: RendezvousPoint) -> int:
        """Returns the number of a meeting: even for collectives, matched by order of issue, odd for P2P transfers."""
        found = self._meetings.get(meeting)
        if found is None:
            found = self._meetings[meeting] = 2 * len(self._met) + (meeting.ranks.kind == "send")
            self._met.append(meeting)
        return found

    def shape(self, structure: Hashable) -> int:
        """Returns the number of a state's shape, the state without its indices."""
        found = self._shapes.get(structure)
        if found is None:
            found = self._shapes[structure] = len(self.structures)
            self.structures.append(structure)
        return found

    def template_rows(self, rows: Sequence[TemplateRow]) -> int:
        """Stores the rows of a template; returns the index of the first."""
        self._rows.extend(rows)
        return len(self._rows) - len(rows)

    def stamp(self, walked: RowWalk, stage: Integers, microbatch: Integers) -> None:
        """Adds a row of actions to the rank.

        Args:
            walked: Templates of the row, and the operations that they may wait for, counted from the rank's first.
            stage, microbatch: ``(actions,)`` Stage and microbatch of each action; -1 for no microbatch.
        """
        self._stamped.append((*walked._replace(inputs=walked.inputs + self.num_ops), stage, microbatch))
        self.num_ops += int(walked.num_ops.sum())

    def columns(self) -> OpColumns:
        """Returns all stamped operations as columns."""
        first_row, num_ops, inputs, num_inputs, of_stage, microbatch = map(
            np.concatenate, zip(*self._stamped, strict=True)
        )
        start = np.cumsum(num_ops) - num_ops
        # by operation: index of its stamped template, and its row
        of = np.repeat(np.arange(len(num_ops)), num_ops)
        row = np.arange(self.num_ops) + (first_row - start)[of]
        stream, kind, name, stage, action, has_microbatch, work, memory, group = (
            np.array([each[column] for each in self._rows], np.int32)[row] for column in range(9)
        )
        stage = stage + of_stage[of].astype(np.int32)
        number = np.where(has_microbatch, microbatch[of], -1)
        counts = np.array([len(each.waits) for each in self._rows], np.int64)
        waits = np.array([wait for each in self._rows for wait in each.waits], np.int64)
        waits_from = np.cumsum(counts) - counts
        wait_first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[row])])
        waiting = np.repeat(np.arange(self.num_ops), counts[row])
        relative = waits[np.arange(wait_first[-1]) + (waits_from[row] - wait_first[:-1])[waiting]]
        inputs = np.append(inputs, 0)  # for operations that wait for none
        inputs_from = np.cumsum(num_inputs) - num_inputs
        template = of[waiting]
        symbol = np.where(relative < 0, inputs_from[template] - 1 - relative, 0)
        wait = np.where(relative < 0, inputs[symbol], start[template] + relative)
        self._among_own_ranks(work, group)
        begins = np.array([each.first_op for each in self._ranks])
        ranks = np.repeat([each.rank for each in self._ranks], np.diff(begins, append=self.num_ops))
        return OpColumns(
            ranks.astype(np.int32),
            stream.astype(np.int8),
            kind.astype(np.int8),
            name,
            stage,
            action.astype(np.int8),
            number.astype(np.int32),
            work,
            memory,
            _meetings(group, number, stage + _SOURCE[action], ranks),
            wait_first,
            wait.astype(np.int32),
        )

    def _among_own_ranks(self, work: NDArray[np.int32], meeting: NDArray[np.int32]) -> None:
        """Replaces the peers of the template's rank by the peers of the stamped rank."""
        ends = [each.first_op for each in self._ranks[1:]] + [self.num_ops]
        for start, end in zip(self._ranks, ends, strict=True):
            if start.rank != start.leader:
                here = slice(start.first_op, end)
                work[here] = _replaced(work[here], partial(self._moved_work, start))
                meeting[here] = _replaced(meeting[here], partial(self._moved_meeting, start))

    def _moved_work(self, start: _RankStart, entry: int) -> int:
        """Number of the rank's work; members of a group share it."""
        work = self.works[entry]
        groups = [id(start.moved(each.ranks)) for each in _communications(work)]
        if not groups:
            return entry
        found = self._moved.get((entry, *groups))
        if found is None:
            found = self._moved[entry, *groups] = self.work(tuple(map(start.moved_work, work)))
        return found

    def _moved_meeting(self, start: _RankStart, number: int) -> int:
        if number < 0:
            return number
        meeting = self._met[number // 2]
        ranks = start.moved(meeting.ranks)
        found = self._moved_meetings.get((number, id(ranks)))
        if found is None:
            found = self._moved_meetings[number, id(ranks)] = self.meeting(meeting._replace(ranks=ranks))
        return found


def _communications(work: tuple[Work, ...]) -> Iterator[Communication]:
    """Yields the communications of an operation, also those beside compute."""
    for part in work:
        if isinstance(part, Communication):
            yield part
        elif isinstance(part, OverlapRemainder):
            yield from part.communications


class _RankStart:
    """Start of a rank's operations, whose templates are those of another rank.

    Args:
        first_op: Index of its first operation.
        rank, leader, mapping: See ``ProgramBuilder.start``.
        kept: Groups so far, each as one object.
    """

    def __init__(
        self,
        first_op: int,
        rank: int,
        leader: int,
        mapping: RankMapping,
        kept: dict[tuple[GroupKind, RankGroup], RankGroup],
    ) -> None:
        self.first_op, self.rank, self.leader = first_op, rank, leader
        self._mapping, self._kept = mapping, kept
        self._groups: dict[tuple[GroupKind, RankGroup], RankGroup] = {}  # groups of the leader -> groups of the rank

    def moved(self, ranks: tuple[int, ...]) -> RankGroup:
        """Returns the rank's group for one of the leader, the same object for all its members."""
        assert isinstance(ranks, RankGroup), "groups of a Program have a kind"
        found = self._groups.get((ranks.kind, ranks))
        if found is None:
            moved = self._mapping.like(ranks, self.leader, self.rank)
            found = self._groups[ranks.kind, ranks] = self._kept.setdefault((moved.kind, moved), moved)
        return found

    def moved_communication(self, communication: Communication) -> Communication:
        """Returns the communication of the rank for one of the leader."""
        return communication._replace(ranks=self.moved(communication.ranks))

    def moved_work(self, work: Work) -> Work:
        """Returns the work of the rank for one of the leader; only communication differs."""
        match work:
            case Communication():
                return self.moved_communication(work)
            case OverlapRemainder():
                return work._replace(communications=tuple(map(self.moved_communication, work.communications)))
            case _:
                return work


def _replaced(column: NDArray[np.int32], other: Callable[[int], int]) -> NDArray[np.int32]:
    others = np.bincount(1 + column).astype(np.int32)
    used = np.flatnonzero(others)
    others[used] = [other(entry - 1) for entry in used.tolist()]
    return others[1 + column]


_SOURCE = np.array(
    [{ActionKind.RECV_F: -1, ActionKind.RECV_B: 1}.get(kind, 0) for kind in ACTION_KINDS], np.int32
)  # stage of a transfer's sender minus stage of the action


def _meetings(
    group: NDArray[np.int32], microbatch: NDArray[np.int64], source: NDArray[np.int32], rank: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the number of the meeting of each operation, -1 for none.

    A P2P transfer is identified by its microbatch and source stage, a collective by the number of earlier ones of its
    rank.
    """
    found = np.full(len(group), -1, np.int64)
    meets = np.flatnonzero(group >= 0)
    if not len(meets):
        return found
    of_rank = group[meets] * (1 + rank.max()) + rank[meets]
    order = np.argsort(of_rank, kind="stable")
    begins = np.flatnonzero(np.diff(of_rank[order], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    before = np.empty(len(meets), np.int64)
    before[order] = np.arange(len(order)) - np.repeat(begins, sizes)
    sent = microbatch[meets] * (2 + source.max()) + source[meets]
    which = np.where(group[meets] % 2 == 1, sent, before)
    found[meets] = group[meets].astype(np.int64) * (1 + which.max()) + which
    return found


def take_state(attributes: Sequence[StateAttribute]) -> tuple[Hashable, list[int]]:
    """Returns the shape of a state, and the indices of operations in it, in order."""
    indices: list[int] = []
    return tuple([_taken(getattr(owner, name), indices) for owner, name in attributes]), indices


def restore_state(attributes: Sequence[StateAttribute], shape: Hashable, num_symbols: int = 0) -> int:
    """Restores attributes to the state of a shape, with symbols for its indices: -1 for the first, -2 for the second.

    Args:
        num_symbols: Number of symbols that others have; the first one here follows them.

    Returns:
        The number of symbols, those of others included.
    """
    assert isinstance(shape, tuple)
    symbols = map(OpIndex, count(-1 - num_symbols, -1))
    for (owner, name), value in zip(attributes, shape, strict=True):
        setattr(owner, name, _restored(value, symbols))
    return -1 - next(symbols)


_INDEX = ("index",)
_PLAIN = frozenset((int, bool, str, type(None)))


def _taken(value: Any, indices: list[int]) -> Hashable:
    kind = type(value)
    if kind is OpIndex:
        indices.append(int(value))
        return _INDEX
    if kind in _PLAIN or isinstance(value, Enum):
        plain: Hashable = value
        return plain
    if kind is dict:
        return dict, tuple([(key, _taken(each, indices)) for key, each in value.items()])
    if kind is set:
        return set, frozenset(value)
    return kind, tuple([_taken(each, indices) for each in value])  # a list, a deque or a tuple


def _restored(shape: Any, symbols: Iterator[OpIndex]) -> Any:
    if shape is _INDEX:
        return next(symbols)
    if type(shape) is not tuple:
        return shape
    kind, values = shape
    if kind is set:
        return set(values)
    if kind is dict:
        return {key: _restored(each, symbols) for key, each in values}
    items = [_restored(each, symbols) for each in values]
    if kind is list:
        return items
    return kind(*items) if hasattr(kind, "_fields") else kind(items)
