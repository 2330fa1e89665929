"""Partitions of layers into contiguous stages."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import StageAssignment

_ROUNDING = 1 + 1e-9  # sums of equal layers at different positions differ by rounding, which must not choose the split

_UNITS = 10**9  # of a block's time: integers of equal sums are equal
_FEW_SPLITS = 2000  # so many are all compared
_MAX_ELEMENTS = 1_000_000  # of an array of splits

_Floats = NDArray[np.float64]
_Indices = NDArray[np.int64]


def balanced_assignment(
    layer_times_s: Sequence[float], num_stages: int, num_last: int = 1, stage_ranks: Sequence[int] | None = None
) -> StageAssignment:
    """Returns the contiguous split whose slowest rank is fastest; among those, the one whose slowest stage is fastest.

    In steady state a pipeline is as fast as the rank with most work per microbatch, the sum over the stages of that
    rank. Remaining ties go to the split with the least sum of squares, over ranks and stages.

    Embedding and head count like any layer, so a stage with one of them gets fewer blocks. Every stage has at least one
    block: the first and the last layers are never alone in a stage.

    The result is exact if every rank has one stage, if all blocks but the first and the last take equal time, or if
    there are few splits. Otherwise, the best split is improved until no shift of neighboring boundaries by one block
    improves it further.

    Args:
        layer_times_s: Forward plus backward seconds of every layer for one microbatch, embedding first, head last.
        num_stages: Number of stages; at most the number of blocks.
        num_last: Number of layers after the last block, which stay together: the head, and those before it.
        stage_ranks: ``(num_stages,)`` Pipeline rank of every stage; None for one stage per rank.

    Complexity: O(num_stages * blocks^2) elements of numpy, O(blocks^2) memory.
    """
    num_blocks = len(layer_times_s) - 1 - num_last
    assert 1 <= num_stages <= num_blocks, (num_stages, num_blocks)
    intervals = _intervals(tuple(layer_times_s), num_blocks)
    if stage_ranks is None or len(set(stage_ranks)) == num_stages:
        inner = _balanced_stages(intervals, num_stages)
    else:
        inner = _balanced_ranks(intervals, np.array(stage_ranks)).tolist()
    return StageAssignment((0, *(block + 1 for block in inner), len(layer_times_s)))


def balanced_unequal_assignment(
    layer_times_s: Sequence[Sequence[float]],
    stage_ranks: Sequence[int],
    num_last: int = 1,
    max_blocks: Sequence[int] | None = None,
) -> StageAssignment:
    """Returns the contiguous split whose slowest rank is fastest, for pipeline ranks on unequal devices.

    With one stage per rank the result is exact, and among equally good splits the most even one. With several stages
    per rank, the best split of single stages is improved until no shift of neighboring boundaries improves it further.

    Args:
        layer_times_s: By pipeline rank, the times of ``balanced_assignment`` on its devices.
        stage_ranks: ``(num_stages,)`` Pipeline rank of every stage.
        num_last: See ``balanced_assignment``.
        max_blocks: ``(num_stages,)`` Most blocks of every stage, which its memory allows; None for no limit. Ignored
            if no split is within the limits.

    Complexity: as ``balanced_assignment``.
    """
    num_layers = len(layer_times_s[0])
    num_blocks, num_stages = num_layers - 1 - num_last, len(stage_ranks)
    intervals = [_intervals(tuple(layer_times_s[rank]), num_blocks) for rank in stage_ranks]
    times_s = [each.times_s for each in intervals]
    if max_blocks is not None and sum(max_blocks) >= num_blocks:
        sizes = np.subtract.outer(np.arange(num_blocks + 1), np.arange(num_blocks + 1))
        times_s = [np.where(sizes <= most, each, np.inf) for each, most in zip(times_s, max_blocks, strict=True)]
    slowest_s = _smallest_slowest_of_unequal(times_s) * _ROUNDING
    inner = np.array(_most_even([np.where(each <= slowest_s, each**2, np.inf) for each in times_s]), np.int64)
    if len(set(stage_ranks)) < num_stages:
        before_s = np.array([each.before_s for each in intervals])
        while True:
            shifted = _best_split(_with_shifts(inner, num_blocks), before_s, np.array(stage_ranks))
            if (shifted == inner).all():
                break
            inner = shifted
    return StageAssignment((0, *(block + 1 for block in inner.tolist()), num_layers))


def _smallest_slowest_of_unequal(times_s: Sequence[_Floats]) -> float:
    """Returns the smallest possible time of the slowest stage, by dynamic programming over the stages.

    Args:
        times_s: By stage, ``[end, start]`` seconds of its blocks.
    """
    slowest_s = times_s[0][:, 0]  # of the stages so far, by the end of the last of these
    for stage_s in times_s[1:]:
        slowest_s = np.maximum(slowest_s[None, :], stage_s).min(axis=1)
    return float(slowest_s[-1])


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


def _balanced_stages(intervals: _Intervals, num_stages: int) -> list[int]:
    """Returns the inner boundaries, in blocks, of the best split with one stage per rank.

    The smallest possible slowest stage comes first, then the most even split in which no stage is slower.
    """
    slowest_s = _smallest_slowest(intervals, num_stages) * _ROUNDING
    return _most_even([np.where(intervals.times_s <= slowest_s, intervals.times_s**2, np.inf)] * num_stages)


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


def _most_even(squares: Sequence[_Floats]) -> list[int]:
    """Returns inner boundaries, in blocks, of the split with the least sum of squares, by dynamic programming.

    Args:
        squares: By stage, ``[end, start]``, infinite for a stage that is not allowed.
    """
    num_stages = len(squares)
    # a stage starts at one of `places` blocks: each stage before it and after it needs a block
    places = len(squares[0]) - num_stages
    least = np.full(places, np.inf)
    least[0] = 0.0
    choices: list[NDArray[np.signedinteger[Any]]] = []
    for stage in range(num_stages):
        sums = least + squares[stage][stage + 1 : stage + 1 + places, stage : stage + places]
        choices.append(sums.argmin(axis=1))
        least = sums.min(axis=1)
    place, inner = places - 1, []
    for stage in range(num_stages - 1, 0, -1):
        place = int(choices[stage][place])
        inner.append(place + stage)
    return inner[::-1]


def _balanced_ranks(intervals: _Intervals, stage_ranks: _Indices) -> _Indices:
    """Returns the inner boundaries, in blocks, of the best split with several stages per rank."""
    before_s, num_stages = intervals.before_s, len(stage_ranks)
    num_blocks = len(before_s) - 1
    block_s = np.diff(before_s)
    equal = _with_equal_blocks(block_s, stage_ranks)
    if np.allclose(block_s[1:-1], block_s[1], rtol=_ROUNDING - 1, atol=0.0):
        return equal
    if math.comb(num_blocks - 1, num_stages - 1) <= _FEW_SPLITS:
        every = np.array(list(combinations(range(1, num_blocks), num_stages - 1)))
        return _best_split(every, before_s, stage_ranks)
    best = _best_split(np.array([_balanced_stages(intervals, num_stages), equal]), before_s, stage_ranks)
    while True:
        shifted = _best_split(_with_shifts(best, num_blocks), before_s, stage_ranks)
        if (shifted == best).all():
            return best
        best = shifted


def _with_equal_blocks(block_s: _Floats, stage_ranks: _Indices) -> _Indices:
    """Returns the inner boundaries of the best split if all blocks but the first and the last take equal time.

    Their order does not matter then, so stages are only numbers of blocks. Each stage begins with one block. A limit on
    the time of ranks or stages is sufficient if the remaining blocks fit within it. Within the smallest limits, blocks
    are added one by one where the sum of squares grows least. This is exact, since the constraints are nested.

    Args:
        block_s: ``(blocks,)`` Seconds of every block; the mean of the inner ones counts for all of them.
        stage_ranks: See ``balanced_assignment``.
    """
    num_stages = len(stage_ranks)
    num_added = len(block_s) - num_stages
    counts = np.ones(num_stages, np.int64)
    if num_added == 0:
        return counts.cumsum()[:-1]
    first, last = (round(_UNITS * seconds / block_s[1:-1].mean()) for seconds in (block_s[0], block_s[-1]))
    stages = np.array([first, *(_UNITS,) * (num_stages - 2), last])
    ranks = np.bincount(stage_ranks, stages).astype(np.int64)

    def most_added(rank_limit: int, stage_limit: int) -> int:
        """Number of blocks that fit; -1 if the first ones do not fit."""
        to_ranks, to_stages = (rank_limit - ranks) // _UNITS, (stage_limit - stages) // _UNITS
        fits = to_ranks.min() >= 0 and to_stages.min() >= 0
        return int(np.minimum(to_ranks, np.bincount(stage_ranks, to_stages)).sum()) if fits else -1

    def limits(used: _Indices) -> list[int]:
        distinct = np.unique(used)  # few, as most stages begin with an equal block
        return [int(limit) for limit in np.unique(distinct[:, None] + _UNITS * np.arange(num_added + 1))]

    of_ranks, of_stages = limits(ranks), limits(stages)
    rank_limit = of_ranks[bisect_left(of_ranks, num_added, key=lambda limit: most_added(limit, of_stages[-1]))]
    stage_limit = of_stages[bisect_left(of_stages, num_added, key=lambda limit: most_added(rank_limit, limit))]
    # among equals the last stage: earlier ones keep the activations of more microbatches
    shortest: list[list[tuple[int, int]]] = [[] for _ in ranks]
    for stage, (rank, time) in enumerate(zip(stage_ranks.tolist(), stages.tolist(), strict=True)):
        heappush(shortest[rank], (time, -stage))
    least = [(time + of_rank[0][0], of_rank[0][1], rank, time)
             for rank, (time, of_rank) in enumerate(zip(ranks.tolist(), shortest, strict=True))]  # fmt: skip
    heapify(least)
    while num_added:
        _, minus_stage, rank, of_all = heappop(least)
        time = shortest[rank][0][0] + _UNITS
        of_all += _UNITS
        if of_all > rank_limit or time > stage_limit:
            continue  # the other stages of the rank take no less
        heapreplace(shortest[rank], (time, minus_stage))
        heappush(least, (of_all + shortest[rank][0][0], shortest[rank][0][1], rank, of_all))
        counts[-minus_stage] += 1
        num_added -= 1
    return counts.cumsum()[:-1]


def _best_split(splits: _Indices, before_s: _Floats, stage_ranks: _Indices) -> _Indices:
    """Returns the best of ``(splits, stages - 1)`` inner boundaries, the first of equally good ones.

    Args:
        before_s: ``(blocks + 1,)`` Seconds before a block, or ``(stages, blocks + 1)`` for unequal devices.
    """
    ends = [(0, 0), (1, 1)]
    bounds = np.pad(splits, ends, constant_values=((0, 0), (0, before_s.shape[-1] - 1)))
    if before_s.ndim == 1:
        stage_s = np.diff(before_s[bounds] / before_s[-1])
    else:
        stages = np.arange(len(before_s))
        stage_s = (before_s[stages, bounds[:, 1:]] - before_s[stages, bounds[:, :-1]]) / before_s[:, -1].max()
    rank_s = stage_s @ (stage_ranks[:, None] == np.arange(stage_ranks.max() + 1))
    squares = (stage_s**2).sum(axis=1) + (rank_s**2).sum(axis=1)
    order = np.lexsort(np.round((squares, stage_s.max(axis=1), rank_s.max(axis=1)), 9))
    best: _Indices = splits[order[0]]
    return best


def _with_shifts(inner: _Indices, num_blocks: int) -> _Indices:
    """Returns inner boundaries, and those with neighboring boundaries shifted by one block, as rows."""
    size = len(inner)
    reach = min(size, max(1, _MAX_ELEMENTS // (2 * size * size)))  # boundaries shifted together, for limited memory
    first, length = np.divmod(np.arange(size * reach), reach)
    place = np.arange(size)
    shifts = (place >= first[:, None]) & (place <= (first + length)[:, None])
    rows = np.concatenate([inner[None], inner + shifts, inner - shifts])
    steps = np.diff(rows, axis=1, prepend=0, append=num_blocks)
    return rows[(steps > 0).all(axis=1)]


def assign_stage_layers(stage_layers: Sequence[int], num_last: int = 1) -> StageAssignment:
    """Returns a custom split from blocks per stage; the embedding joins the first stage, layers after blocks the last.

    Args:
        stage_layers: Blocks of every stage.
        num_last: See ``balanced_assignment``.
    """
    boundaries = [0, *(num_blocks + 1 for num_blocks in accumulate(stage_layers))]
    boundaries[-1] += num_last
    return StageAssignment(tuple(boundaries))
