"""Layers of every pipeline rank, as published runs have them, shared out over its stages."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.plan.schedules import Placement

__all__ = ["layers_of_stages"]


def layers_of_stages(by_rank: Sequence[int], virtual_stages: int, placement: Placement = "loop") -> tuple[int, ...]:
    """Layers of every stage, as even as they can be.

    What a rank has too little for equal stages is missing where it has an end of the model, since embedding and head
    are counted as layers there: in the first stage of all, or in the last.

    Args:
        by_rank: Layers of every pipeline rank.
        virtual_stages: Stages of a rank.
        placement: Which rank has which stages.

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
