"""Splits layers into contiguous stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from simplan.spec.plan import StageAssignment

__all__ = ["assign_stage_layers", "balanced_assignment"]


def balanced_assignment(layer_times_s: Sequence[float], num_stages: int) -> StageAssignment:
    """The contiguous split whose slowest stage is fastest, by dynamic programming; exact.

    Among equally good splits it takes the one whose stages are most even (least sum of squares). Embedding and head
    count like any layer, so a stage that holds one gets fewer blocks. Every stage holds at least one block: the
    first and the last layer are never alone in a stage.

    Args:
        layer_times_s: Forward plus backward time of every layer of one microbatch, embedding first, head last.
        num_stages: Stages to make; at most the number of blocks.

    Complexity: O(num_stages * layers^2).
    """
    num_layers = len(layer_times_s)
    num_blocks = num_layers - 2
    assert 1 <= num_stages <= num_blocks, (num_stages, num_blocks)
    before = [0.0, *accumulate(layer_times_s)]

    def cost(first: int, last: int) -> tuple[float, float]:
        time_s = before[last] - before[first]
        return time_s, time_s * time_s

    # best[j]: (slowest stage, sum of squares, boundaries) of the first j layers in the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        # a first stage needs the embedding and a block, a last one a block and the head
        shortest = 2 if stage == 0 else 1
        ends = [num_layers] if stage == num_stages - 1 else range(shortest, num_layers - 1)
        for end in ends:
            options = []
            for start, (slowest, squares, boundaries) in best.items():
                enough = end - start >= (shortest if end < num_layers else (2 if stage else 3))
                if start < end and enough:
                    time_s, square = cost(start, end)
                    options.append((max(slowest, time_s), squares + square, (*boundaries, end)))
            if options:
                following[end] = min(options)
        best = following
    return StageAssignment(best[num_layers][2])


def assign_stage_layers(stage_layers: Sequence[int]) -> StageAssignment:
    """The user's own split: blocks per stage; the embedding joins the first stage, the head the last."""
    boundaries = [0, *accumulate(stage_layers)]
    boundaries = [0, *(b + 1 for b in boundaries[1:])]
    boundaries[-1] += 1
    return StageAssignment(tuple(boundaries))
