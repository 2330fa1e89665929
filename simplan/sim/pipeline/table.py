"""A complete Level 1 table as arrays, made without an object per action."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simplan.program.action import Action, ActionKind, Table
from simplan.program.complete import Unshard
from simplan.sim.pipeline.events import complete
from simplan.sim.pipeline.orders import compute_order
from simplan.sim.pipeline.sharding import NONE, ONCE, WINDOW
from simplan.sim.pipeline.slots import NUM_SLOTS, Slot, kind_of
from simplan.sim.pipeline.types import Bytes, Ints, Longs, Places, Steps

__all__ = ["PipelineTable", "Tables", "compiled_table"]

_MAKES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
_UNSHARD = {"none": NONE, "once": ONCE, "window": WINDOW}


@dataclass(frozen=True, slots=True, eq=False)
class PipelineTable:
    """Everything that all ranks do in a step, in an order in which nothing stands before what it waits for.

    Attributes:
        num_ranks, num_stages, num_microbatches: Of the pipeline.
        rank_of: By stage, its rank.
        sends_over: ``(3, stages)``; for F (0) and for B or I (1), the pair of ranks over which the result of a stage
            goes, -1 where it goes nowhere or stays on the rank; nothing for W (2).
        gets_over: The same for what it needs.
        num_pairs: Pairs of ranks that exchange messages.
        two_peers: Some rank sends (or receives) results of one kind to (or from) two ranks.
        slot, stage, microbatch: Of every event.
        segments: ``(segments, 4)``: first event, events, how often they come, and by how much their microbatches are
            higher from one time to the next.
        live: ``(results, 3)``: where a segment that comes more than once begins, what has been sent and not been used:
            segment, place among what waits (way times stages plus receiving stage), microbatch.
        depth: A power of two, no smaller than the results that wait for a neighbouring stage at once.
        memory_slots: Slots that may change memory.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of: Ints
    sends_over: Ints
    gets_over: Ints
    num_pairs: int
    two_peers: bool
    slot: Bytes
    stage: Ints
    microbatch: Ints
    segments: Longs
    live: Longs
    depth: int
    memory_slots: Longs

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return sum(array.nbytes for array in (*self.places, self.slot, self.stage, self.microbatch, self.segments))

    @property
    def places(self) -> Places:
        """Where stages are, and over what they talk."""
        return self.rank_of, self.sends_over, self.gets_over

    def events(self, first: int, length: int) -> Steps:
        """Slot, stage and microbatch of some events."""
        part = slice(first, first + length)
        return self.slot[part], self.stage[part], self.microbatch[part]

    def actions(self) -> Table:
        """The same as ``simplan.program.table.plan_table`` gives."""
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for number, s, j in self.walk():
            kind, row = kind_of(number), rows[self.rank_of[s]]
            row.append(Action(s, kind, j if kind.per_microbatch else None))
            forward = kind is ActionKind.FORWARD
            if kind in _MAKES and self.sends_over[0 if forward else 1, s] >= 0:
                target = s + 1 if forward else s - 1
                row.append(Action(s, ActionKind.SEND_F if forward else ActionKind.SEND_B, j))
                receive = ActionKind.RECV_F if forward else ActionKind.RECV_B
                rows[self.rank_of[target]].append(Action(target, receive, j))
        return tuple(tuple(row) for row in rows)

    def walk(self) -> Iterator[tuple[int, int, int]]:
        """Slot, stage and microbatch of every event, those that repeat themselves as often as they come."""
        for first, length, repeats, shift in self.segments.tolist():
            columns = [column.tolist() for column in self.events(first, length)]
            for number in range(repeats):
                for slot, stage, microbatch in zip(*columns, strict=True):
                    yield slot, stage, microbatch + number * shift


def compiled_table(schedule: str, pp: int, m: int, v: int, unshard: Unshard) -> PipelineTable:
    """The table of a pipeline.

    Args:
        schedule: One of ``COMPILED_SCHEDULES``.
        pp, m, v: Pipeline ranks, microbatches of a step, stages of a rank.
        unshard: Which stages are gathered when.
    """
    order = compute_order(schedule, pp, m, v)
    events = complete(order, _UNSHARD[unshard], m)
    sends_over, gets_over, num_pairs = _pairs(order.rank_of)
    return PipelineTable(
        num_ranks=pp,
        num_stages=pp * v,
        num_microbatches=m,
        rank_of=order.rank_of,
        sends_over=sends_over,
        gets_over=gets_over,
        num_pairs=num_pairs,
        two_peers=schedule == "zb-v" and pp > 2,
        slot=events.slot,
        stage=events.stage,
        microbatch=events.microbatch,
        segments=events.segments,
        live=_arrived(events.live, gets_over),
        depth=1 << (events.most_waiting - 1).bit_length(),
        memory_slots=_memory_slots(events.slot),
    )


def _arrived(live: Longs, gets_over: Ints) -> Longs:
    """Of what has been made and not been used, what another rank has sent."""
    segment, way, maker, microbatch = live.T
    receiver = maker + 1 - 2 * way
    sent = gets_over[way, receiver] >= 0
    waiting = np.stack([segment, way * gets_over.shape[1] + receiver, microbatch], axis=1)
    return np.asarray(waiting[sent])


def _memory_slots(slots: Bytes) -> Longs:
    """Those of events but for OPTIM, and the first part of a computation after UNSHARD."""
    occurs = np.bincount(slots, minlength=NUM_SLOTS) > 0
    occurs[Slot.SETTLE], occurs[Slot.OPTIM] = occurs[Slot.UNSHARD], False
    return np.flatnonzero(occurs)


class Tables:
    """Tables that were used last, up to some memory.

    Args:
        most_bytes: Of all of them together.
    """

    def __init__(self, most_bytes: int = 128 * 2**20) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._known: OrderedDict[tuple[str, int, int, int, Unshard], PipelineTable] = OrderedDict()

    def get(self, schedule: str, pp: int, m: int, v: int, unshard: Unshard) -> PipelineTable:
        """``compiled_table`` of the same arguments."""
        key = (schedule, pp, m, v, unshard)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        table = self._known[key] = compiled_table(*key)
        self._held_bytes += table.num_bytes
        while self._held_bytes > self._most_bytes and len(self._known) > 1:
            self._held_bytes -= self._known.popitem(last=False)[1].num_bytes
        return table


def _pairs(rank_of: Ints) -> tuple[Ints, Ints, int]:
    """Over which pair of ranks every stage sends and gets, see ``PipelineTable``, and how many pairs there are."""
    pairs: dict[frozenset[int], int] = {}
    sends_over, gets_over = np.full((2, 3, len(rank_of)), -1, np.int32)
    for boundary, ends in enumerate(zip(rank_of.tolist(), rank_of.tolist()[1:], strict=False)):
        if ends[0] != ends[1]:
            pair = pairs.setdefault(frozenset(ends), len(pairs))
            sends_over[0, boundary] = gets_over[0, boundary + 1] = pair
            sends_over[1, boundary + 1] = gets_over[1, boundary] = pair
    return sends_over, gets_over, len(pairs)
