"""Layers split over ranks without pipelining: one microbatch at a time, there and back."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape

__all__ = ["naive"]


def naive(shape: PipelineShape) -> Table:
    """Forward and backward of a microbatch end before the next one starts; all ranks but one are idle.

    Bubble fraction (p-1)/p; one microbatch in flight.

    Args:
        shape: The pipeline; one stage a rank.
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
