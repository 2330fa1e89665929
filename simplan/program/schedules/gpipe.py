"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape

__all__ = ["gpipe", "naive"]


def gpipe(shape: PipelineShape) -> Table:
    """All forwards, then all backwards, both in microbatch order.

    Bubble fraction (p-1)/(m+p-1); m microbatches in flight on every stage.

    Args:
        shape: The pipeline; one stage per rank.
    """
    assert shape.virtual_stages == 1, shape
    return tuple(
        tuple(
            Action(rank, kind, microbatch)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for microbatch in range(shape.num_microbatches)
        )
        for rank in range(shape.num_ranks)
    )


def naive(shape: PipelineShape) -> Table:
    """Completes forward and backward of a microbatch before the next one starts; all ranks except one are idle.

    Bubble fraction (p-1)/p; one microbatch in flight.

    Args:
        shape: The pipeline; one stage per rank.
    """
    assert shape.virtual_stages == 1, shape
    return tuple(
        tuple(
            Action(rank, kind, microbatch)
            for microbatch in range(shape.num_microbatches)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        )
        for rank in range(shape.num_ranks)
    )
