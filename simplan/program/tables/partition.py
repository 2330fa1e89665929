"""Splits layers into contiguous stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import StageAssignment

__all__ = ["assign_stage_layers", "balanced_assignment"]

_ROUNDING = 1 + 1e-9  # sums of equal layers at different places differ by rounding, which must not choose the split

_Floats = NDArray[np.float64]


def balanced_assignment(layer_times_s: Sequence[float], num_stages: int, num_last: int = 1) -> StageAssignment:
    """The contiguous split whose slowest stage is fastest; among those, the one with the least sum of squares. Exact.

    Two steps, because the second aim cannot be reached stage by stage while the slowest is still unknown: first the
    smallest possible slowest stage, then the most even split of which no stage is slower.

    Embedding and head count like any layer, so a stage that holds one gets fewer blocks. Every stage holds at least
    one block: the first and the last layers are never alone in a stage.

    Stages count one by one, also where a rank has several (stages r, r + p, ... of an interleaved schedule): a rank is
    then busy for at most as many times the slowest stage.

    Args:
        layer_times_s: Forward plus backward time of every layer of one microbatch, embedding first, head last.
        num_stages: Stages to make; at most the number of blocks.
        num_last: Layers after the last block, which stay together: the head, and those before it.

    Complexity: O(num_stages * blocks^2) elements of numpy, O(blocks^2) memory.
    """
    num_blocks = len(layer_times_s) - 1 - num_last
    assert 1 <= num_stages <= num_blocks, (num_stages, num_blocks)
    intervals = _intervals(tuple(layer_times_s), num_blocks)
    slowest_s = _smallest_slowest(intervals, num_stages) * _ROUNDING
    inner = _most_even(np.where(intervals.times_s <= slowest_s, intervals.times_s**2, np.inf), num_stages)
    return StageAssignment((0, *(block + 1 for block in inner), len(layer_times_s)))


class _Intervals(NamedTuple):
    """What a stage may take.

    Attributes:
        before_s: ``(blocks + 1,)`` Time before a block; the embedding is part of the first one, the last layers of the
            last one.
        times_s: ``[end, start]`` Of blocks start to end - 1; endless where there is no block among them.
        sorted_s: All that are not endless, ascending.
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
    """The least time that no stage of some split exceeds: it is the time of some interval, so bisect these.

    A time is enough when stages that each take as many blocks as they can within it are at most ``num_stages``:
    splitting stages further never makes one slower.
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
    """Inner boundaries, in blocks, of the split with the least sum of squares; by dynamic programming.

    Args:
        squares: ``[end, start]``, infinite for a stage that may not be.
        num_stages: Stages to make.
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
    """The user's own split: blocks per stage; the embedding joins the first stage, what follows blocks the last.

    Args:
        stage_layers: Blocks of every stage.
        num_last: As of ``balanced_assignment``.
    """
    boundaries = [0, *accumulate(stage_layers)]
    boundaries = [0, *(b + 1 for b in boundaries[1:])]
    boundaries[-1] += num_last
    return StageAssignment(tuple(boundaries))
