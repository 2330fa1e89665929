"""Where a rank gathers and lets go of stages, as ``simplan.program.complete`` says it, as arrays."""

from __future__ import annotations

import numpy as np

from simplan.sim.pipeline.jit import compiled
from simplan.sim.pipeline.slots import Slot

__all__ = ["NONE", "ONCE", "WINDOW", "row_sharding"]

NONE, ONCE, WINDOW = 0, 1, 2
_WIDTH = 3  # stages that torch keeps gathered: one forward, one backward, one ahead
_UNSHARD, _RESHARD, _REDUCED = int(Slot.UNSHARD), int(Slot.RESHARD), int(Slot.RESHARD_REDUCED)


@compiled
def row_sharding(row, last_use, unshard, first, slot, stage):  # type: ignore[no-untyped-def]
    """Writes the RESHARDs and UNSHARDs of a row.

    Args:
        row: Stages of the row's actions.
        last_use: By stage, the place in the row of its last action.
        unshard: NONE, ONCE or WINDOW.
        first: Gets, by place in the row and for its end, where what comes before it begins, and where all ends.
        slot, stage: Get what is done to which stage.
    """
    if unshard == NONE:
        first[:] = 0
    elif unshard == ONCE:
        _once(row, last_use, first, slot, stage)
    else:
        _window(row, last_use, first, slot, stage)


@compiled
def _once(row, last_use, first, slot, stage):  # type: ignore[no-untyped-def]
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


@compiled
def _window(row, last_use, first, slot, stage):  # type: ignore[no-untyped-def]
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


@compiled
def _holds(stages, stage):  # type: ignore[no-untyped-def]
    for other in stages:  # noqa: SIM110 - compiled as it stands
        if stage >= 0 and other == stage:
            return True
    return False
