"""Partitions of layers into contiguous stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import StageAssignment

_ROUNDING = 1 + 1e-9  # sums of equal layers at different positions differ by rounding, which must not choose the split

_Floats = NDArray[np.float64]


def balanced_assignment(layer_times_s: Sequence[float], num_stages: int, num_last: int = 1) -> StageAssignment:
    """Returns the contiguous split whose slowest stage is fastest; among those, the one with the least sum of squares.

    The result is exact and takes two steps, because the second aim depends on the slowest stage of the whole split:
    first the smallest possible slowest stage, then the most even split in which no stage is slower.

    Embedding and head count like any layer, so a stage with one of them gets fewer blocks. Every stage has at least one
    block: the first and the last layers are never alone in a stage.

    Stages count individually, even if a rank has several (stages r, r + p, ... of an interleaved schedule). The time of
    a rank is then at most the number of its stages times the slowest stage.

    Args:
        layer_times_s: Forward plus backward seconds of every layer for one microbatch, embedding first, head last.
        num_stages: Number of stages; at most the number of blocks.
        num_last: Number of layers after the last block, which stay together: the head, and those before it.

    Complexity: O(num_stages * blocks^2) elements of numpy, O(blocks^2) memory.
    """
    num_blocks = len(layer_times_s) - 1 - num_last
    assert 1 <= num_stages <= num_blocks, (num_stages, num_blocks)
    intervals = _intervals(tuple(layer_times_s), num_blocks)
    slowest_s = _smallest_slowest(intervals, num_stages) * _ROUNDING
    inner = _most_even(np.where(intervals.times_s <= slowest_s, intervals.times_s**2, np.inf), num_stages)
    return StageAssignment((0, *(block + 1 for block in inner), len(layer_times_s)))


class _Intervals(NamedTuple):
    """Times of all contiguous ranges of blocks.

    Attributes:
        before_s: ``(blocks + 1,)`` Seconds before a block; the embedding is part of the first block, the last layers
            are part of the last one.
        times_s: ``[end, start]`` Seconds of blocks start to end - 1; infinite for an empty range.
        sorted_s: All finite times, ascending.
    """

    before_s: _Floats
    times_s: _Floats
    sorted_s: _Floats


@lru_cache(maxsize=256)
def _intervals(layer_times_s: tuple[float, ...], num_blocks: int) -> _Intervals:
    total = np.cumsum(layer_times_s)
    before_s = np.concatenate(([0.0], total[1:num_blocks], total[-1:]))
    times_s = before_s[:, None] - before_s[None, :]
    times_s[np.triu_indices(num_blocks + 1)] = np.inf
    return _Intervals(before_s, times_s, np.sort(times_s[np.isfinite(times_s)]))


def _smallest_slowest(intervals: _Intervals, num_stages: int) -> float:
    """Returns the smallest possible time of the slowest stage: the time of some interval, found by bisection.

    A time is sufficient if at most ``num_stages`` stages result when each takes as many blocks as fit within that time.
    Splitting stages further never makes one slower.
    """
    before_s, _, sorted_s = intervals
    low, high = 0, len(sorted_s) - 1
    while low < high:
        middle = (low + high) // 2
        reached = np.searchsorted(before_s, before_s + sorted_s[middle] * _ROUNDING, side="right").tolist()
        end = 0
        for _ in range(num_stages):
            end = reached[end] - 1
        low, high = (low, middle) if end == len(before_s) - 1 else (middle + 1, high)
    return float(sorted_s[low])


def _most_even(squares: _Floats, num_stages: int) -> list[int]:
    """Returns inner boundaries, in blocks, of the split with the least sum of squares, by dynamic programming.

    Args:
        squares: ``[end, start]``, infinite for a stage that is not allowed.
    """
    # a stage starts at one of `places` blocks: each stage before it and after it needs a block
    places = len(squares) - num_stages
    least = np.full(places, np.inf)
    least[0] = 0.0
    choices: list[NDArray[np.signedinteger[Any]]] = []
    for stage in range(num_stages):
        sums = least + squares[stage + 1 : stage + 1 + places, stage : stage + places]
        choices.append(sums.argmin(axis=1))
        least = sums.min(axis=1)
    place, inner = places - 1, []
    for stage in range(num_stages - 1, 0, -1):
        place = int(choices[stage][place])
        inner.append(place + stage)
    return inner[::-1]


def assign_stage_layers(stage_layers: Sequence[int], num_last: int = 1) -> StageAssignment:
    """Returns a custom split from blocks per stage; the embedding joins the first stage, layers after blocks the last.

    Args:
        stage_layers: Blocks of every stage.
        num_last: See ``balanced_assignment``.
    """
    boundaries = [0, *(num_blocks + 1 for num_blocks in accumulate(stage_layers))]
    boundaries[-1] += num_last
    return StageAssignment(tuple(boundaries))
