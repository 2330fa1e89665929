"""The most memory that every rank of a pipeline needs, for many plans that share a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simplan.sim.jit import jit
from simplan.sim.pipeline.slots import NUM_SLOTS, Slot
from simplan.sim.pipeline.table import PipelineTable
from simplan.sim.pipeline.types import Flags, Longs, Places, Steps

__all__ = ["PipelineBytes", "pipeline_in_flight", "pipeline_peaks"]


_WAY = np.full(NUM_SLOTS, 2, np.int64)
_WAY[Slot.FORWARD] = 0
_WAY[Slot.BACKWARD : Slot.WEIGHT] = 1
_UNSHARD, _OPTIM, _SETTLE = int(Slot.UNSHARD), int(Slot.OPTIM), int(Slot.SETTLE)
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = int(Slot.FORWARD), int(Slot.BACKWARD), int(Slot.INPUT), int(Slot.WEIGHT)


@dataclass(frozen=True, slots=True)
class PipelineBytes:
    """What everything does to memory, bytes, the last axis of every array being the plan.

    Attributes:
        during: ``(slots, stages, plans)``: by ``Slot``, the most that is held more than before while it happens.
            Something of several parts, one after the other, has the most of what the parts before have left and the
            part needs.
        after: ``(slots, stages, plans)``: What is held more than before once it is over; negative where it frees.
        sent: ``(2, stages, plans)``: Results of F, and of B or I, that are held from their SEND to OPTIM.
        base: ``(ranks, plans)``: What is held between steps.
        extra: ``(ranks, plans)``: What is held once beside that (DDP's rebuilding of its buckets).
    """

    during: Longs
    after: Longs
    sent: Longs
    base: Longs
    extra: Longs

    @classmethod
    def zeros(cls, num_stages: int, num_ranks: int, num_plans: int) -> PipelineBytes:
        """Arrays to fill in; whatever is left takes no memory."""
        k = num_plans
        return cls(
            during=np.zeros((NUM_SLOTS, num_stages, k), np.int64),
            after=np.zeros((NUM_SLOTS, num_stages, k), np.int64),
            sent=np.zeros((2, num_stages, k), np.int64),
            base=np.zeros((num_ranks, k), np.int64),
            extra=np.zeros((num_ranks, k), np.int64),
        )

    @property
    def sent_forward(self) -> Longs:
        """``(stages - 1, plans)``: by boundary between stage b and b + 1, what is sent forward; a part of ``sent``."""
        return np.asarray(self.sent[0, :-1])

    @property
    def sent_backward(self) -> Longs:
        """What is sent back over the same boundary."""
        return np.asarray(self.sent[1, 1:])


def pipeline_peaks(table: PipelineTable, held: PipelineBytes) -> Longs:
    """Most bytes that every rank holds at once, ``(ranks, plans)``, by the walk of ``simplan.sim.memory``.

    Args:
        table: What all ranks do.
        held: What it does to memory.
    """
    events = table.slot, table.stage, table.microbatch
    changes = held.during, held.after, held.sent
    most, now = _walked(events, table.segments, table.places, changes, held.base, held.extra)
    assert (now == held.base).all(), "memory is not back to its base"
    return most


@jit
def _walked(
    events: Steps, segments: Longs, places: Places, changes: tuple[Longs, Longs, Longs], base: Longs, extra: Longs
) -> tuple[Longs, Longs]:
    """The most that is held in a step, and what is held at its end."""
    slots, stages, microbatches = events
    now, most = base.copy(), base + extra
    kept = np.zeros_like(now)
    is_gathering = np.zeros(changes[0].shape[1], np.bool_)
    for number in range(len(segments)):
        first, length, repeats, _ = segments[number]
        before, kept_before, top = now.copy(), kept.copy(), now.copy()
        part = slice(first, first + length)
        _walk((slots[part], stages[part], microbatches[part]), places, changes, now, kept, is_gathering, top)
        more = repeats - 1
        for r in range(now.shape[0]):
            for k in range(now.shape[1]):
                # each time it comes, it leaves as much, and what it needs at most is that much higher the next time
                left = now[r, k] - before[r, k]
                most[r, k] = max(most[r, k], top[r, k] + more * max(left, 0))
                now[r, k] += more * left
                kept[r, k] += more * (kept[r, k] - kept_before[r, k])
    return most, now


@jit
def _walk(
    events: Steps,
    places: Places,
    changes: tuple[Longs, Longs, Longs],
    now: Longs,
    kept: Longs,
    is_gathering: Flags,
    top: Longs,
) -> None:
    """Goes through events once; ``kept`` is what is held of messages."""
    slots, stages, _ = events
    rank_of, sends_over, _ = places
    during, after, sent = changes
    num_plans = now.shape[1]
    for e in range(len(slots)):
        slot, s = slots[e], stages[e]
        r = rank_of[s]
        if slot == _OPTIM:
            now[r] -= kept[r]
            kept[r] = 0
        elif slot == _UNSHARD:
            is_gathering[s] = True
        elif slot < _UNSHARD and is_gathering[s]:
            is_gathering[s] = False
            for k in range(num_plans):
                top[r, k] = max(top[r, k], now[r, k] + during[_SETTLE, s, k])
                now[r, k] += after[_SETTLE, s, k]
        for k in range(num_plans):
            top[r, k] = max(top[r, k], now[r, k] + during[slot, s, k])
            now[r, k] += after[slot, s, k]
        way = _WAY[slot]
        if way < 2 and sends_over[way, s] >= 0:
            for k in range(num_plans):
                now[r, k] += sent[way, s, k]
                top[r, k] = max(top[r, k], now[r, k])
                kept[r, k] += sent[way, s, k]


def pipeline_in_flight(table: PipelineTable) -> Longs:
    """Most microbatches between forward and the end of backward at once, ``(stages,)``."""
    alive, most = np.zeros(table.num_stages, np.int64), np.zeros(table.num_stages, np.int64)
    for first, length, repeats, _ in table.segments.tolist():
        before, top = alive.copy(), alive.copy()
        _count(table.events(first, length), alive, top)
        left = alive - before
        np.maximum(most, top + (repeats - 1) * np.maximum(left, 0), out=most)
        alive += (repeats - 1) * left
    return most


@jit
def _count(events: Steps, alive: Longs, top: Longs) -> None:
    slots, stages, _ = events
    for e in range(len(slots)):
        slot, s = slots[e], stages[e]
        if slot == _FORWARD:
            alive[s] += 1
            top[s] = max(top[s], alive[s])
        elif _BACKWARD <= slot < _INPUT or _WEIGHT <= slot < _UNSHARD:
            alive[s] -= 1
