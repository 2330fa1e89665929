"""Peak memory of all ranks from arrays: what ``simplan.sim.memory`` finds by walking, found by cumulative sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simplan.program.program import MemoryCategory, Program

__all__ = ["MemoryPeaks", "memory_peaks"]

_CATEGORIES = tuple(MemoryCategory)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPeaks:
    """The worst instant of every rank that is written out.

    Attributes:
        ranks: (num_ranks,) Global ranks, in the order of ``Program.ranks``.
        position: (num_ranks,) Where in the rank's list it is; -1 for the time between steps.
        by_category: (num_ranks, num_categories) Bytes of the device at that instant, columns in the order of
            ``MemoryCategory``; memory of the host is none of it unless the program's ``one_memory`` is set.
    """

    ranks: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    by_category: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        """(num_ranks,) Sum over the categories."""
        total: npt.NDArray[np.int64] = self.by_category.sum(axis=1)
        return total


def memory_peaks(program: Program) -> MemoryPeaks:
    """The same instants and bytes as ``memory_peak`` of each rank."""
    on_device = [program.one_memory or category is not MemoryCategory.HOST for category in _CATEGORIES]
    during, after = (found * on_device for found in _effects(program))
    of_op = np.array([op.rank for op in program.ops], np.int64)
    in_order = np.argsort(of_op, kind="stable")  # each rank's operations in host issue order, rank after rank
    ranks = np.array(program.ranks, np.int64)
    begins, ends = (np.searchsorted(of_op[in_order], ranks, side) for side in ("left", "right"))
    position = np.empty(len(ranks), np.int64)
    by_category = np.empty((len(ranks), len(_CATEGORIES)), np.int64)
    for row, rank in enumerate(program.ranks):
        mine = in_order[begins[row] : ends[row]]
        resting = program.resting_bytes[rank]
        held = np.array([resting.get(category, 0) for category in _CATEGORIES], np.int64) * on_device
        position[row], by_category[row] = _worst(held, program.rebuild_bytes[rank], during[mine], after[mine])
    return MemoryPeaks(ranks, position, by_category)


def _worst(
    resting: npt.NDArray[np.int64],
    rebuild_bytes: int,
    during: npt.NDArray[np.int64],
    after: npt.NDArray[np.int64],
) -> tuple[int, npt.NDArray[np.int64]]:
    """Position and bytes by category of one rank's peak, from what rests and the effects of its operations."""
    between = resting.copy()
    between[_CATEGORIES.index(MemoryCategory.BUFFERS)] += rebuild_bytes
    held = resting + np.cumsum(after, axis=0) - after  # before each operation
    while_it_runs = held + during
    totals = while_it_runs.sum(axis=1)
    worst = int(totals.argmax()) if len(totals) else -1
    if worst < 0 or totals[worst] <= between.sum():
        return -1, between
    return worst, while_it_runs[worst]


def _effects(program: Program) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(num_ops, num_categories) Bytes more while each operation runs, and once it is done."""
    column = {category: number for number, category in enumerate(_CATEGORIES)}
    width = len(_CATEGORIES)
    place, during, after = [], [], []
    for index, op in enumerate(program.ops):
        for effect in op.memory:
            place.append(index * width + column[effect.category])
            during.append(effect.during_bytes)
            after.append(effect.after_bytes)
    sums = []
    for amounts in (during, after):
        total = np.zeros(len(program.ops) * width, np.int64)
        np.add.at(total, np.array(place, np.int64), np.array(amounts, np.int64))
        sums.append(total.reshape(len(program.ops), width))
    return sums[0], sums[1]
