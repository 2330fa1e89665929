"""Layers per stage from layers per pipeline rank, as published runs give them."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.plan.schedules import Placement

__all__ = ["layers_of_stages"]


def layers_of_stages(by_rank: Sequence[int], virtual_stages: int, placement: Placement = "loop") -> tuple[int, ...]:
    """Distribute the layers of each rank evenly over its stages.

    A rank with too few layers for equal stages gets fewer in its stage with the embedding or head, which count as
    layers there: the first or the last stage of the pipeline.

    Args:
        by_rank: Layers of each pipeline rank.
        virtual_stages: Stages per rank.
        placement: Assignment of stages to ranks.

    >>> layers_of_stages([3, 4, 4, 3], 2)
    (1, 2, 2, 2, 2, 2, 2, 1)
    >>> layers_of_stages([3, 4], 2, "v")
    (2, 2, 2, 1)
    """
    num_ranks = len(by_rank)
    stages = [0] * (num_ranks * virtual_stages)
    for rank, layers in enumerate(by_rank):
        least, more = divmod(layers, virtual_stages)
        sizes = [least + (turn < more) for turn in range(virtual_stages)]
        if rank == 0 and placement == "loop":
            sizes.reverse()
        for turn, size in enumerate(sizes):
            back = placement == "v" and turn % 2
            place = num_ranks - 1 - rank if back else rank
            stages[turn * num_ranks + place] = size
    return tuple(stages)
