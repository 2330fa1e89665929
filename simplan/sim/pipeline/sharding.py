"""Where a rank gathers and lets go of stages, as ``simplan.program.complete`` says it, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simplan.sim.jit import jit
from simplan.sim.pipeline.orders import Order
from simplan.sim.pipeline.scratch import scratch
from simplan.sim.pipeline.slots import Slot
from simplan.sim.pipeline.types import Bytes, Ints

__all__ = ["NONE", "ONCE", "WINDOW", "Sharding", "shard_rows"]

NONE, ONCE, WINDOW = 0, 1, 2
_WIDTH = 3  # stages that torch keeps gathered: one forward, one backward, one ahead
_UNSHARD, _RESHARD, _REDUCED = int(Slot.UNSHARD), int(Slot.RESHARD), int(Slot.RESHARD_REDUCED)


class Sharding(NamedTuple):
    """RESHARDs and UNSHARDs of every rank, ``(ranks, changes)``; arrays without columns where there are none.

    Attributes:
        first: ``(ranks, actions + 2)``: where those before each action of a row and those after its last one begin, and
            where all end.
        slot, stage: What is done to which stage.
    """

    first: Ints
    slot: Bytes
    stage: Ints


def shard_rows(order: Order, last_use: Ints, unshard: int) -> Sharding:
    """What the rows do about sharding; valid until the same thread asks again.

    Args:
        order: Compute actions of every rank.
        last_use: By stage, the place in its row of its last action.
        unshard: NONE, ONCE or WINDOW.
    """
    p = len(order.kind)
    places = order.length + 2 if unshard else 0
    most = (0, 2 * len(order.rank_of), 2 * order.length + 8)[unshard]
    sharding = Sharding(
        scratch("shard_first", (p, places), np.int32),
        scratch("shard_slot", (p, most), np.uint8),
        scratch("shard_stage", (p, most), np.int32),
    )
    if unshard:
        _write(order.length, order.stage, last_use, unshard, *sharding)
    return sharding


@jit
def _write(
    length: int, stage: Ints, last_use: Ints, unshard: int, shard_first: Ints, shard_slot: Bytes, shard_stage: Ints
) -> None:
    for r in range(len(stage)):
        if unshard == ONCE:
            _once(stage[r, :length], last_use, shard_first[r], shard_slot[r], shard_stage[r])
        else:
            _window(stage[r, :length], last_use, shard_first[r], shard_slot[r], shard_stage[r])


@jit
def _once(row: Ints, last_use: Ints, first: Ints, slot: Bytes, stage: Ints) -> None:
    first[0] = n = 0
    for i in range(len(row)):
        if not _holds(stage[:n], row[i]):
            slot[n], stage[n] = _UNSHARD, row[i]
            n += 1
    for i in range(len(row)):
        first[i + 1] = n
        if last_use[row[i]] == i:
            slot[n], stage[n] = _REDUCED, row[i]
            n += 1
    first[len(row) + 1] = n


@jit
def _window(row: Ints, last_use: Ints, first: Ints, slot: Bytes, stage: Ints) -> None:
    # before each action, the stages that come next, in order of their next use
    wanted = np.full((len(row) + 1, _WIDTH), -1, np.int32)
    for i in range(len(row) - 1, -1, -1):
        wanted[i, 0] = row[i]
        filled = 1
        for k in range(_WIDTH):
            coming = wanted[i + 1, k]
            if coming >= 0 and coming != row[i] and filled < _WIDTH:
                wanted[i, filled] = coming
                filled += 1
    gathered = np.full(_WIDTH, -1, np.int32)
    n = 0
    for i in range(len(wanted)):
        first[i] = n
        kept = 0
        for k in range(_WIDTH):
            if _holds(wanted[i], gathered[k]):
                gathered[kept] = gathered[k]
                kept += 1
            elif gathered[k] >= 0:
                slot[n] = _REDUCED if last_use[gathered[k]] < i else _RESHARD
                stage[n] = gathered[k]
                n += 1
        gathered[kept:] = -1
        for k in range(_WIDTH):
            if wanted[i, k] >= 0 and not _holds(gathered, wanted[i, k]):
                slot[n], stage[n] = _UNSHARD, wanted[i, k]
                n += 1
                gathered[kept] = wanted[i, k]
                kept += 1
    first[len(wanted)] = n


@jit
def _holds(stages: Ints, stage: int) -> bool:
    for other in stages:  # noqa: SIM110 - compiled as it stands
        if stage >= 0 and other == stage:
            return True
    return False
