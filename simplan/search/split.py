"""The balanced split in machine code: what ``simplan.program.partition.balanced_assignment`` finds, for a search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simplan.sim.jit import jit

__all__ = ["balanced_boundaries"]

_ROUNDING = 1 + 1e-9  # as there


def balanced_boundaries(layer_times_s: Sequence[float], num_stages: int, num_last: int = 1) -> tuple[int, ...]:
    """The boundaries of ``balanced_assignment`` with the same arguments."""
    total = np.cumsum(layer_times_s)
    before = np.concatenate(([0.0], total[1 : -1 - num_last], total[-1:]))
    inner = _split(before, num_stages)
    return (0, *(inner + 1).tolist(), len(layer_times_s))


@jit
def _split(before: NDArray[np.float64], num_stages: int) -> NDArray[np.int64]:
    """Inner boundaries in blocks; ``before`` has the time before each block, and of all.

    First the smallest slowest stage by bisection, down to neighbouring floats, then the least sum of squares by
    dynamic programming over the places that a stage can begin at.
    """
    num_blocks = len(before) - 1
    low_s, high_s = 0.0, before[num_blocks]  # too little, and enough
    while True:
        middle_s = (low_s + high_s) / 2
        if middle_s <= low_s or middle_s >= high_s:
            break
        end = 0
        for _ in range(num_stages):
            start = end
            while end < num_blocks and before[end + 1] - before[start] <= middle_s:
                end += 1
        if end == num_blocks:
            high_s = middle_s
        else:
            low_s = middle_s
    slowest_s = high_s * _ROUNDING

    places = num_blocks + 1 - num_stages
    least = np.full(places, np.inf)
    least[0] = 0.0
    choices = np.zeros((num_stages, places), np.int64)
    for stage in range(num_stages):
        sums = np.full(places, np.inf)
        for end in range(places):
            for start in range(end + 1):
                stage_s = before[stage + 1 + end] - before[stage + start]
                if stage_s <= slowest_s and least[start] + stage_s**2 < sums[end]:
                    sums[end] = least[start] + stage_s**2
                    choices[stage, end] = start
        least = sums
    inner = np.empty(num_stages - 1, np.int64)
    place = places - 1
    for stage in range(num_stages - 1, 0, -1):
        place = choices[stage, place]
        inner[stage - 1] = place + stage
    return inner
