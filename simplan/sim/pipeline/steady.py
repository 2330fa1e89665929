"""Walks what repeats itself until all ranks advance together, and takes the rest in one leap.

Starts and ends are maxima of sums, so a walk over some events is a max-plus linear map of the state before: if the
state is later by c everywhere, so is everything after, and small differences do not grow (the map is nonexpansive;
Baccelli, Cohen, Olsder and Quadrat 1992, Synchronization and Linearity, chapters 3 and 4). So once a walk makes
everything later by the same c, which events of the segment read again, every further one does too. It is taken to be
the same within 1e-11 c; n more walks are then off by at most 1e-11 n c of the n c that they take.
"""

from __future__ import annotations

import numpy as np

from simplan.sim.jit import jit
from simplan.sim.pipeline.slots import Slot
from simplan.sim.pipeline.types import Flags, Floats, Longs, Places, Steps
from simplan.sim.pipeline.walk import WAY, State, lane_of, walk

__all__ = ["repeat"]

Touched = tuple[Flags, Flags, Flags, Flags]

_ROUNDING = 1e-11
_UNSHARD = int(Slot.UNSHARD)


@jit
def repeat(
    events: Steps,
    repeats: int,
    shift: int,
    live: Longs,
    depth: int,
    places: Places,
    state: State,
    costs: tuple[Floats, ...],
    blocking_sends: bool,
    received_ahead: bool,
) -> None:
    """Goes through a segment as often as it comes.

    Args:
        events: Slot, stage and microbatch of its events.
        repeats, shift: How often it comes, and by how much microbatches are higher from one time to the next.
        live: What is on its way when it begins: place among what waits, and microbatch.
        depth, places, state, costs, blocking_sends, received_ahead: As for ``walk``.
    """
    if repeats == 1:
        walk(events, 0, depth, places, state, costs, blocking_sends, received_ahead)
        return
    touched = _touched(events, places, state, received_ahead)
    number, check = 0, 1
    while number < repeats:
        if number < check or repeats - number < 3:
            walk(events, number * shift, depth, places, state, costs, blocking_sends, received_ahead)
            number += 1
            continue
        check *= 2
        before = _read(touched, live, number * shift, depth, state)
        walk(events, number * shift, depth, places, state, costs, blocking_sends, received_ahead)
        number += 1
        after = _read(touched, live, number * shift, depth, state)
        later = after[0] - before[0]
        if _is_steady(before, after, later):
            more = repeats - number
            for i in range(len(after)):
                for k in range(len(later)):
                    after[i, k] += more * later[k]
            _write(touched, live, repeats * shift, depth, state, after)
            return


@jit
def _touched(events: Steps, places: Places, state: State, received_ahead: bool) -> Touched:
    """Which pairs, streams, gathers of ranks and gathers of stages a segment writes."""
    slots, stages, _ = events
    rank_of, sends_over, _ = places
    pairs, streams = np.zeros(len(state.pair_s), np.bool_), np.zeros((4, state.stream_s.shape[1]), np.bool_)
    shards, gathers = np.zeros(len(rank_of), np.bool_), np.zeros(len(rank_of), np.bool_)
    for e in range(len(slots)):
        s, way = stages[e], WAY[slots[e]]
        if slots[e] == _UNSHARD:
            shards[rank_of[s]] = gathers[s] = True
        elif way < 2 and sends_over[way, s] >= 0:
            sender, receiver = rank_of[s], rank_of[s + 1 if way == 0 else s - 1]
            pairs[lane_of(sends_over[way, s], way, sender, receiver, received_ahead)] = True
            if streams.shape[1] > 0:
                streams[2 * way, sender] = True
                streams[2 * way + 1, receiver] = True
    gathers &= state.is_gathering
    return pairs, streams, shards, gathers


@jit
def _read(touched: Touched, live: Longs, offset: int, depth: int, state: State) -> Floats:
    """Everything that a segment reads and writes, one row each; ranks' clocks come first."""
    pairs, streams, shards, gathers = touched
    num_units = state.gathered_s.shape[1]
    num = len(state.clock_s) + pairs.sum() + streams.sum() + shards.sum() + gathers.sum() * num_units + len(live)
    rows = np.empty((num, state.clock_s.shape[1]))
    n = 0
    for r in range(len(state.clock_s)):
        n = _copy(state.clock_s[r], rows, n)
    for i in range(len(pairs)):
        if pairs[i]:
            n = _copy(state.pair_s[i], rows, n)
    for i in range(len(streams)):
        for r in range(streams.shape[1]):
            if streams[i, r]:
                n = _copy(state.stream_s[i, r], rows, n)
    for r in range(len(shards)):
        if shards[r]:
            n = _copy(state.shard_s[r], rows, n)
    for s in range(len(gathers)):
        if gathers[s]:
            for u in range(num_units):
                n = _copy(state.gathered_s[s, u], rows, n)
    for i in range(len(live)):
        n = _copy(state.arrival_s[live[i, 0] * depth + ((live[i, 1] + offset) & (depth - 1))], rows, n)
    return rows


@jit
def _write(touched: Touched, live: Longs, offset: int, depth: int, state: State, rows: Floats) -> None:
    """The inverse of ``_read``."""
    pairs, streams, shards, gathers = touched
    num_units = state.gathered_s.shape[1]
    n = 0
    for r in range(len(state.clock_s)):
        n = _copy_back(rows, n, state.clock_s[r])
    for i in range(len(pairs)):
        if pairs[i]:
            n = _copy_back(rows, n, state.pair_s[i])
    for i in range(len(streams)):
        for r in range(streams.shape[1]):
            if streams[i, r]:
                n = _copy_back(rows, n, state.stream_s[i, r])
    for r in range(len(shards)):
        if shards[r]:
            n = _copy_back(rows, n, state.shard_s[r])
    for s in range(len(gathers)):
        if gathers[s]:
            for u in range(num_units):
                n = _copy_back(rows, n, state.gathered_s[s, u])
    for i in range(len(live)):
        n = _copy_back(rows, n, state.arrival_s[live[i, 0] * depth + ((live[i, 1] + offset) & (depth - 1))])


@jit
def _copy(values: Floats, rows: Floats, n: int) -> int:
    """Writes a row and gives the number of the next; arrays that are assigned would take numba seconds to compile."""
    for k in range(len(values)):
        rows[n, k] = values[k]
    return n + 1


@jit
def _copy_back(rows: Floats, n: int, values: Floats) -> int:
    """The inverse of ``_copy``."""
    for k in range(len(values)):
        values[k] = rows[n, k]
    return n + 1


@jit
def _is_steady(before: Floats, after: Floats, later: Floats) -> bool:
    for i in range(len(before)):
        for k in range(len(later)):
            if abs(after[i, k] - before[i, k] - later[k]) > _ROUNDING * later[k]:
                return False
    return True
