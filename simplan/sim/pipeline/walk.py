"""The longest path through a pipeline: one walk over its events, for many plans at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simplan.sim.jit import jit
from simplan.sim.pipeline.slots import Slot
from simplan.sim.pipeline.types import Flags, Floats, Places, Steps

__all__ = ["DURATIONS", "WAY", "State", "lane_of", "walk"]


DURATIONS = ("forward", "backward", "backward_last", "input", "weight", "weight_last")
_ROW = np.zeros(len(Slot), np.int64)  # by slot, its row of durations
WAY = np.full(len(Slot), 2, np.int64)  # and 0 for what makes activations, 1 for what makes their gradients
for _slot in Slot:
    _kind = _slot.name.split("_")[0].lower()
    _last = "_last" if _slot.name.endswith(("LAST", "ONLY")) else ""
    _ROW[_slot] = DURATIONS.index(_kind + _last) if _kind in DURATIONS else -1
    WAY[_slot] = {"forward": 0, "backward": 1, "input": 1}.get(_kind, 2)
_UNSHARD, _REDUCE, _NARROW = int(Slot.UNSHARD), int(Slot.REDUCE_GRAD), int(Slot.REDUCE_GRAD_NARROW)


class State(NamedTuple):
    """How far everything is; the last axis is the plan.

    Attributes:
        clock_s: By rank, the end of its last computation.
        pair_s: By pair of ranks, way and sender, the end of the last message; the first of a pair's four has all of
            them where these wait for each other.
        stream_s: By way and end (F sent, F received, B sent, B received) and rank, the end of its last message, where
            that is not the last one of a pair.
        arrival_s: Ends of messages that have not been used, ``depth`` for each way and receiving stage.
        shard_s: By rank, the end of its last all-gather.
        gathered_s: By stage and unit, the end of its last all-gather.
        is_gathering: By stage, whether nobody has waited for these yet.
    """

    clock_s: Floats
    pair_s: Floats
    stream_s: Floats
    arrival_s: Floats
    shard_s: Floats
    gathered_s: Floats
    is_gathering: Flags


@jit
def lane_of(pair: int, way: int, sender: int, receiver: int, received_ahead: bool) -> int:
    """Row of ``State.pair_s``."""
    return 4 * pair + (2 * way + (sender < receiver) if received_ahead else 0)


@jit
def walk(
    events: Steps,
    offset: int,
    depth: int,
    places: Places,
    state: State,
    costs: tuple[Floats, ...],
    blocking_sends: bool,
    received_ahead: bool,
) -> None:
    """Goes through events once, with microbatches that are higher by ``offset``.

    With ``blocking_sends`` a rank goes on when what it sent has come, with ``received_ahead`` a message waits neither
    for its receiver nor for those of the other way.
    """
    slots, stages, microbatches = events
    rank_of, sends_over, gets_over = places
    clock, pair, stream, arrival, shard, gathered, is_gathering = state
    compute_s, send_s, gather_s, copy_s, reduce_copy_s, reduce_s = costs
    num_stages, num_plans = compute_s.shape[1:]
    has_streams = stream.shape[1] > 0
    for e in range(len(slots)):
        slot, s = slots[e], stages[e]
        r = rank_of[s]
        if slot < _UNSHARD:
            way, row = WAY[slot], _ROW[slot]
            j = (microbatches[e] + offset) & (depth - 1)
            gets = gets_over[way, s] >= 0
            a = (way * num_stages + s) * depth + j
            if is_gathering[s]:
                is_gathering[s] = False
                if gets:
                    for k in range(num_plans):
                        clock[r, k] = max(clock[r, k], arrival[a, k])
                for u in range(gathered.shape[1]):
                    for k in range(num_plans):
                        clock[r, k] = max(clock[r, k], gathered[s, u, k]) + copy_s[s, u, k]
            if gets:
                for k in range(num_plans):
                    clock[r, k] = max(clock[r, k], arrival[a, k]) + compute_s[row, s, k]
            else:
                for k in range(num_plans):
                    clock[r, k] += compute_s[row, s, k]
            over = sends_over[way, s]
            if over < 0:
                continue
            target = s + 1 if way == 0 else s - 1
            q = rank_of[target]
            over = lane_of(over, way, r, q, received_ahead)
            b = (way * num_stages + target) * depth + j
            if has_streams:
                for k in range(num_plans):
                    pair[over, k] = max(pair[over, k], stream[2 * way, r, k], stream[2 * way + 1, q, k])
            for k in range(num_plans):
                receiver_s = 0.0 if received_ahead else clock[q, k]
                arrival[b, k] = max(clock[r, k], receiver_s, pair[over, k]) + send_s[way, s, k]
                pair[over, k] = arrival[b, k]
                if blocking_sends:
                    clock[r, k] = arrival[b, k]
            if has_streams:
                for k in range(num_plans):
                    stream[2 * way, r, k] = stream[2 * way + 1, q, k] = pair[over, k]
        elif slot == _UNSHARD:
            is_gathering[s] = True
            for u in range(gathered.shape[1]):
                for k in range(num_plans):
                    shard[r, k] = max(shard[r, k], clock[r, k]) + gather_s[s, u, k]
                    gathered[s, u, k] = shard[r, k]
        elif slot in (_REDUCE, _NARROW):
            for k in range(num_plans):
                clock[r, k] = max(clock[r, k] + reduce_copy_s[s, k], shard[r, k]) + reduce_s[s, k]
