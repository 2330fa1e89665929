"""DualPipeV: DeepSeek's DualPipe cut in half (DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.numbering import number_microbatches
from simplan.program.schedules.shape import PipelineShape

__all__ = ["dualpipe_v"]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def dualpipe_v(shape: PipelineShape) -> Table:
    """Alternates a forward of one stage with a backward of the other; rank r has stages r and 2p-1-r.

    Backward is split only at both ends of the step. Each rank holds activations of at most 2p+1 of these half-size
    stages between F and W, as published. The idle time is p-1 if F, I and W take one each. The forward and backward
    that DeepSeek's runtime overlaps are two actions here, the forward first. torch's ScheduleDualPipeV has the same
    order, but rejects fewer than 2p microbatches; here missing microbatches leave gaps.

    Args:
        shape: The pipeline; two stages per rank.
    """
    assert shape.virtual_stages == 2, shape
    return tuple(_row(rank, shape) for rank in range(shape.num_ranks))


def _row(rank: int, shape: PipelineShape) -> tuple[Action, ...]:
    p, m = shape.num_ranks, max(shape.num_microbatches, 2 * shape.num_ranks)
    down, up = rank, 2 * p - 1 - rank
    num_later = p - 1 - rank
    # the second half of the drain computes only input gradients for other ranks; weight gradients come last, in order
    drain = (rank + 1) * [up, down]
    num_whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    weights = drain[num_whole:] + num_later * [down]
    steps = [
        *2 * num_later * [(_F, down)],
        *(rank + 1) * [(_F, down), (_F, up)],
        *num_later * [(_I, up), (_W, up), (_F, up)],
        *(m - 2 * p + rank + 1) * [(_F, down), (_B, up), (_F, up), (_B, down)],
        *num_later * [(_B, up), (_F, up), (_B, down)],
        *((_B, stage) for stage in drain[:num_whole]),
        *((_I, stage) for stage in drain[num_whole:]),
        *(step for stage in weights[:num_later] for step in ((_W, stage), (_I, down))),
        *((_W, stage) for stage in weights[num_later:]),
    ]
    return number_microbatches(steps, shape.num_microbatches)
