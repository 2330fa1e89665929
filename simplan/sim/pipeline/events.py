"""Completes compute actions as ``simplan.program.complete`` does, in one order that holds for all ranks.

An event is a compute action with the message that follows it, or an UNSHARD, RESHARD, REDUCE_GRAD or OPTIM. Events
stand in the order in which ``complete_table`` comes to them, so what an event waits for stands before it, and a walk
over the events is a walk over every row. What repeats itself in the middle of a step is written once: as soon as all
ranks are where they were a few microbatches before, relative to each other, they will be there again and again for as
long as their rows repeat themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simplan.sim.jit import jit
from simplan.sim.pipeline.again import is_again, skip, times_more, with_live
from simplan.sim.pipeline.orders import B, F, I, Order, W
from simplan.sim.pipeline.scratch import scratch
from simplan.sim.pipeline.sharding import Sharding, shard_rows
from simplan.sim.pipeline.slots import Slot
from simplan.sim.pipeline.types import Bytes, Ints, Longs, Steps

__all__ = ["Events", "complete"]

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = int(Slot.FORWARD), int(Slot.BACKWARD), int(Slot.INPUT), int(Slot.WEIGHT)
_AGAIN = int(Slot.WEIGHT_AGAIN) - int(Slot.WEIGHT)
_AGAIN_LAST = int(Slot.WEIGHT_AGAIN_LAST) - int(Slot.WEIGHT)
_UNSHARD = int(Slot.UNSHARD)
_REDUCE, _REDUCE_NARROW, _OPTIM = int(Slot.REDUCE_GRAD), int(Slot.REDUCE_GRAD_NARROW), int(Slot.OPTIM)


_PADDING = 24  # as in ``orders``


class Events(NamedTuple):
    """All events of a step.

    Attributes:
        slot: What it is, a ``Slot``.
        stage: Of the pipeline.
        microbatch: Of the step; 0 for what is done to a whole stage.
        segments: ``(segments, 4)``: first event, events, how often they come, and by how much their microbatches are
            higher from one time to the next.
        live: ``(results, 4)``: where a segment that comes more than once begins, what has been made and not been used:
            segment, 0 for activations and 1 for gradients, stage that made it, microbatch.
        most_waiting: Most results of one stage that have been made and not been used by its neighbour yet.
    """

    slot: Bytes
    stage: Ints
    microbatch: Ints
    segments: Longs
    live: Longs
    most_waiting: int


def complete(order: Order, unshard: int, num_microbatches: int) -> Events:
    """Puts the actions of all ranks in order and completes them.

    Args:
        order: Compute actions of every rank.
        unshard: NONE, ONCE or WINDOW.
        num_microbatches: Of the step.
    """
    p, num_stages = len(order.kind), len(order.rank_of)
    last_use = np.empty(num_stages, np.int32)
    _find_last_use(order.length, order.stage, last_use)
    sharding = shard_rows(order, last_use, unshard)
    most = p * (order.length + 1) + num_stages + (int(sharding.first[:, -1].sum()) if unshard else 0)
    out = scratch("slots", (most,), np.uint8), scratch("stages", (most,), np.int32), scratch("mbs", (most,), np.int32)
    made = scratch("made", (2, num_stages, num_microbatches + _PADDING), np.int32)
    slot, stage, microbatch, segments, live, most_waiting = _complete(order, last_use, sharding, made, out)
    return Events(slot, stage, microbatch, segments, live, int(most_waiting))


@jit
def _find_last_use(length: int, stage: Ints, last_use: Ints) -> None:
    """By stage, the place of its last action, which is the backward that completes its gradients."""
    for r in range(len(stage)):
        for i in range(length):
            last_use[stage[r, i]] = i


@jit
def _complete(
    order: Order, last_use: Ints, sharding: Sharding, made: Ints, out: Steps
) -> tuple[Bytes, Ints, Ints, Longs, Longs, int]:
    length, kind, stage, microbatch, rank_of, period = order
    shard_first, shard_slot, shard_stage = sharding
    out_slot, out_stage, out_microbatch = out
    p, num_stages, stride = len(kind), len(rank_of), made.shape[2]
    is_sharded = shard_first.shape[1] > 0

    # Ready actions wait in sets, one for each of the next units of time, as no action takes more than two. In a set
    # they stand by depth, then by rank; at most two are equally deep: a forward and a backward.
    place_f, place_b = np.empty(num_stages, np.int64), np.empty(num_stages, np.int64)
    rank_at = np.empty(2 * num_stages, np.int32)
    for s in range(num_stages):
        place_f[s] = 2 * s + (rank_of[s] > rank_of[num_stages - 1 - s])
        rank_at[place_f[s]] = rank_of[s]
    for s in range(num_stages):
        deep = num_stages - 1 - s
        place_b[s] = 2 * deep + (rank_of[s] >= rank_of[deep])
        rank_at[place_b[s]] = rank_of[s]
    ready = np.zeros((3, (2 * num_stages + 63) // 64), np.uint64)

    # results that are there, by way and stage; microbatches come in order
    num_made = np.zeros((2, num_stages), np.int32)
    most_waiting = 1
    free = np.zeros(p, np.int32)
    position = np.zeros(p, np.int32)
    waits_for = np.full(p, -1, np.int64)
    # had a backward; gradients of Ws that no I has added; an I that did; gathers that nobody has waited for
    grown = np.zeros((4, num_stages), np.uint8)
    n = 0
    for r in range(p if is_sharded else 0):
        for change in range(shard_first[r, 1]):
            out_slot[n], out_stage[n], out_microbatch[n] = shard_slot[r, change], shard_stage[r, change], 0
            grown[3, shard_stage[r, change]] = 1
            n += 1
    for r in range(p):  # every row begins with a forward
        s = stage[r, 0]
        if s == 0:
            ready[0, place_f[0] // 64] |= np.uint64(1) << np.uint64(place_f[0] % 64)
        else:
            waits_for[r] = (s - 1) * stride

    next_ranks = np.empty(2, np.int32)
    left = p * length
    now = 0

    old_position, old_free, old_waits_for = position.copy(), free.copy(), waits_for.copy()
    old_ready, old_num_made, old_grown = ready.copy(), num_made.copy(), grown.copy()
    old_now = old_n = segment_start = 0
    segments = np.empty((8, 4), np.int64)
    num_segments = 0
    live = np.empty((0, 4), np.int64)

    while left:
        moved = position[0] - old_position[0]
        if moved == period[0] and num_segments < 6:
            higher = period[1]
            state = position, free, waits_for, ready, num_made, grown
            old = old_position, old_free, old_waits_for, old_ready, old_num_made, old_grown
            skipped = 0
            if is_again(state, old, now, old_now, made, moved, higher, num_stages):
                rows = kind, stage, microbatch, last_use, shard_first, shard_slot, shard_stage
                skipped = times_more(rows, length, old_position, moved, higher)
            if skipped:
                _set(segments[num_segments], segment_start, old_n - segment_start, 1, 0)
                _set(segments[num_segments + 1], old_n, n - old_n, skipped + 1, higher)
                num_segments += 2
                segment_start = n
                live = with_live(live, num_segments - 1, old_num_made)
                skip(state, made, skipped, now - old_now, moved, higher, old_num_made)
                now += skipped * (now - old_now)
                left -= skipped * moved * p
            for r in range(p):
                old_position[r], old_free[r], old_waits_for[r] = position[r], free[r], waits_for[r]
            for word in range(ready.shape[1]):
                for later in range(3):
                    old_ready[later, word] = ready[later, word]
            for s in range(num_stages):
                for way in range(2):
                    old_num_made[way, s] = num_made[way, s]
                for fact in range(4):
                    old_grown[fact, s] = grown[fact, s]
            old_now, old_n = now, n
        bucket = ready[now % 3]
        for word in range(len(bucket)):
            while bucket[word]:
                lowest = bucket[word] & (~bucket[word] + np.uint64(1))
                bucket[word] ^= lowest
                r = rank_at[64 * word + _index(lowest)]
                i = position[r]
                k, s, j = kind[r, i], stage[r, i], microbatch[r, i]
                position[r] += 1
                left -= 1
                is_last = last_use[s] == i
                free[r] = now + (2 if k == B else 1)
                grown[3, s] = 0
                out_slot[n], out_stage[n], out_microbatch[n] = _slot(k, s, is_last, grown), s, j
                n += 1
                if is_last:
                    out_slot[n] = _REDUCE_NARROW if k == W and not grown[2, s] else _REDUCE
                    out_stage[n], out_microbatch[n] = s, 0
                    n += 1
                if is_sharded:
                    for change in range(shard_first[r, i + 1], shard_first[r, i + 2]):
                        out_slot[n], out_stage[n], out_microbatch[n] = shard_slot[r, change], shard_stage[r, change], 0
                        grown[3, shard_stage[r, change]] = shard_slot[r, change] == _UNSHARD
                        n += 1
                next_ranks[0] = r
                num_next = 1
                if k != W:
                    way = 0 if k == F else 1
                    target = s + 1 if k == F else s - 1
                    made[way, s, j] = free[r]
                    num_made[way, s] += 1
                    if 0 <= target < num_stages:
                        most_waiting = max(most_waiting, num_made[way, s] - num_made[way, target])
                        if waits_for[rank_of[target]] == (way * num_stages + s) * stride + j:
                            next_ranks[1] = rank_of[target]
                            num_next = 2
                for number in range(num_next):  # what comes next there: it can start at some time, or waits
                    r = next_ranks[number]
                    i = position[r]
                    waits_for[r] = -1
                    if i == length:
                        continue
                    k, s, j = kind[r, i], stage[r, i], microbatch[r, i]
                    start = free[r]
                    source = s - 1 if k == F else s + 1
                    if k != W and 0 <= source < num_stages:
                        way = 0 if k == F else 1
                        if num_made[way, source] <= j:
                            waits_for[r] = (way * num_stages + source) * stride + j
                            continue
                        start = max(start, made[way, source, j])
                    place = place_f[s] if k == F else place_b[s]
                    ready[start % 3, place // 64] |= np.uint64(1) << np.uint64(place % 64)
        now += 1
    for r in range(p):
        first = num_stages
        for i in range(num_stages):
            if rank_of[i] == r:
                first = min(first, i)
        out_slot[n], out_stage[n], out_microbatch[n] = _OPTIM, first, 0
        n += 1
    _set(segments[num_segments], segment_start, n - segment_start, 1, 0)
    events = out_slot[:n].copy(), out_stage[:n].copy(), out_microbatch[:n].copy()
    return *events, segments[: num_segments + 1].copy(), live, most_waiting


@jit
def _set(segment: Longs, first: int, length: int, repeats: int, shift: int) -> None:
    segment[0], segment[1], segment[2], segment[3] = first, length, repeats, shift


@jit
def _slot(k: int, s: int, is_last: bool, grown: Bytes) -> int:
    """What an action is to its stage, and what that leaves behind: see ``Slot``."""
    if k == F:
        return _FORWARD
    if k == I:
        if not grown[1, s]:
            return _INPUT
        is_first = not grown[2, s]
        grown[1, s], grown[2, s] = 0, 1
        return _INPUT + (2 if is_first else 1)
    is_first = not grown[0, s]
    grown[0, s] = 1
    if k == B:
        return _BACKWARD + is_first + 2 * is_last
    again = grown[1, s]
    grown[1, s] = 1
    if again:
        return _WEIGHT + (_AGAIN_LAST if is_last else _AGAIN)
    return _WEIGHT + is_first + 2 * is_last


_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_INDEX = np.zeros(64, np.int64)
for _bit in range(64):
    _INDEX[((int(_DE_BRUIJN) << _bit) & (2**64 - 1)) >> 58] = _bit


@jit
def _index(lowest: np.uint64) -> int:
    """Index of the only bit that is set (Leiserson, Prokop and Randall 1998, de Bruijn sequences)."""
    index: int = _INDEX[(lowest * _DE_BRUIJN) >> np.uint64(58)]
    return index
