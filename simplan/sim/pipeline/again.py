"""Tells when all ranks are where they were some microbatches before, and goes on from many microbatches later.

The state of ``events._complete`` is ``(position, free, waits_for, ready, num_made, grown)``. Two states are the same
but for a shift when everything that later events depend on is: then the same events follow, shifted, until a row is no
longer a shifted copy of itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simplan.sim.jit import jit
from simplan.sim.pipeline.types import Bytes, Ints, Longs

__all__ = ["is_again", "skip", "times_more", "with_live"]

RunState = tuple[Ints, Ints, Longs, NDArray[np.uint64], Ints, Bytes]
Rows = tuple[Bytes, Ints, Ints, Ints, Ints, Bytes, Ints]


@jit
def is_again(
    state: RunState, old: RunState, now: int, old_now: int, made: Ints, moved: int, higher: int, num_stages: int
) -> bool:
    """Whether a state is an older one with ``moved`` more actions of every rank and ``higher`` microbatches.

    Args:
        state, old: The states.
        now, old_now: Their units of time.
        made: When results came, by way, stage and microbatch.
        moved, higher: The shift.
        num_stages: Of the pipeline.
    """
    position, free, waits_for, ready, num_made, grown = state
    old_position, old_free, old_waits_for, old_ready, old_num_made, old_grown = old
    for r in range(len(position)):
        if position[r] - old_position[r] != moved:
            return False
        if max(free[r] - now, 0) != max(old_free[r] - old_now, 0):
            return False
        if waits_for[r] != (old_waits_for[r] + higher if old_waits_for[r] >= 0 else -1):
            return False
    for later in range(3):
        for word in range(ready.shape[1]):
            if ready[(now + later) % 3, word] != old_ready[(old_now + later) % 3, word]:
                return False
    for s in range(num_stages):
        for number in range(len(grown)):
            if grown[number, s] != old_grown[number, s]:
                return False
        for way in range(2):
            more = num_made[way, s] - old_num_made[way, s]
            if more != 0 and more != higher:
                return False
            target = s + 1 if way == 0 else s - 1
            if not 0 <= target < num_stages:
                continue
            if more != num_made[way, target] - old_num_made[way, target]:
                return False
            if more == 0 and num_made[way, s] > num_made[way, target]:
                return False
            for j in range(old_num_made[way, target], old_num_made[way, s]):
                if max(made[way, s, j + more] - now, 0) != max(made[way, s, j] - old_now, 0):
                    return False
    return True


@jit
def times_more(rows: Rows, length: int, old_position: Ints, moved: int, higher: int) -> int:
    """How many times more all rows do what they did in their last ``moved`` actions, with the next action too."""
    kind, stage, microbatch, last_use, shard_first, shard_slot, shard_stage = rows
    fewest = length
    for r in range(len(kind)):
        i = old_position[r]
        while i + moved < length:
            later = i + moved
            s = stage[r, i]
            if (
                kind[r, later] != kind[r, i]
                or stage[r, later] != s
                or microbatch[r, later] != microbatch[r, i] + higher
            ):
                break
            if (last_use[s] == i) != (last_use[s] == later):
                break
            if shard_first.shape[1] == 0:
                i += 1
                continue
            first, other = shard_first[r, i + 1], shard_first[r, later + 1]
            num_changes = shard_first[r, i + 2] - first
            if shard_first[r, later + 2] - other != num_changes:
                break
            same = True
            for change in range(num_changes):
                same = same and shard_slot[r, first + change] == shard_slot[r, other + change]
                same = same and shard_stage[r, first + change] == shard_stage[r, other + change]
            if not same:
                break
            i += 1
        fewest = min(fewest, (i - old_position[r] - 1) // moved)
    return max(fewest, 0)


@jit
def skip(state: RunState, made: Ints, times: int, taken: int, moved: int, higher: int, old_num_made: Ints) -> None:
    """Changes the state to what it is after the last ``moved`` actions of every rank have come ``times`` times more."""
    position, free, waits_for, ready, num_made, _ = state
    for r in range(len(waits_for)):
        position[r] += times * moved
        free[r] += times * taken
        if waits_for[r] >= 0:
            waits_for[r] += times * higher
    turned = ready.copy()
    for later in range(3):
        for word in range(ready.shape[1]):
            ready[(later + times * taken) % 3, word] = turned[later, word]
    num_stages = num_made.shape[1]
    for way in range(2):
        for s in range(num_stages):
            target = s + 1 if way == 0 else s - 1
            if num_made[way, s] == old_num_made[way, s] or not 0 <= target < num_stages:
                continue
            for j in range(num_made[way, s] - 1, num_made[way, target] - 1, -1):
                made[way, s, j + times * higher] = made[way, s, j] + times * taken
    for way in range(2):
        for s in range(num_stages):
            if num_made[way, s] != old_num_made[way, s]:
                num_made[way, s] += times * higher


@jit
def with_live(live: Longs, segment: int, num_made: Ints) -> Longs:
    """Adds what has been made and not been used when a segment begins."""
    num_stages = num_made.shape[1]
    number = len(live)
    for way in range(2):
        for s in range(num_stages):
            target = s + 1 if way == 0 else s - 1
            if 0 <= target < num_stages:
                number += num_made[way, s] - num_made[way, target]
    found = np.empty((number, 4), np.int64)
    for i in range(len(live)):  # here and elsewhere number by number: arrays that are assigned take seconds to compile
        for column in range(4):
            found[i, column] = live[i, column]
    n = len(live)
    for way in range(2):
        for s in range(num_stages):
            target = s + 1 if way == 0 else s - 1
            if 0 <= target < num_stages:
                for j in range(num_made[way, target], num_made[way, s]):
                    found[n, 0], found[n, 1], found[n, 2], found[n, 3] = segment, way, s, j
                    n += 1
    return found
