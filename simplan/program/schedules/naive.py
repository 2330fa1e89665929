"""Layers split over ranks without pipelining: one microbatch at a time, there and back."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table

__all__ = ["naive"]


def naive(num_ranks: int, num_microbatches: int) -> Table:
    """Forward and backward of a microbatch end before the next one starts; all ranks but one are idle.

    Bubble fraction (p-1)/p; one microbatch in flight.

    Args:
        num_ranks: Pipeline ranks p, one stage each.
        num_microbatches: Microbatches m of a step.
    """
    return tuple(
        tuple(
            Action(rank, kind, microbatch)
            for microbatch in range(num_microbatches)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        )
        for rank in range(num_ranks)
    )
