"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table

__all__ = ["gpipe"]


def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """All forwards, then all backwards, both in microbatch order.

    Bubble fraction (p-1)/(m+p-1); m microbatches in flight on every stage.

    Args:
        num_ranks: Pipeline ranks p, one stage each.
        num_microbatches: Microbatches m of a step.
    """
    return tuple(
        tuple(
            Action(rank, kind, microbatch)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
