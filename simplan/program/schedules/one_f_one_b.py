"""1F1B, also called PipeDream-Flush (Narayanan et al. 2021)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape

__all__ = ["one_f_one_b"]


def one_f_one_b(shape: PipelineShape) -> Table:
    """Runs warm-up forwards to fill the pipeline, then one forward and one backward in turn, then remaining backwards.

    Bubble fraction (p-1)/(m+p-1) as for GPipe, but at most p-r microbatches in flight on stage r.

    Args:
        shape: The pipeline; one stage per rank.
    """
    assert shape.virtual_stages == 1, shape
    return tuple(_row(rank, shape.num_ranks, shape.num_microbatches) for rank in range(shape.num_ranks))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    num_warmup = min(num_ranks - rank - 1, num_microbatches)
    row = [Action(rank, ActionKind.FORWARD, microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches):
        if num_warmup + microbatch < num_microbatches:
            row.append(Action(rank, ActionKind.FORWARD, num_warmup + microbatch))
        row.append(Action(rank, ActionKind.BACKWARD, microbatch))
    return tuple(row)
