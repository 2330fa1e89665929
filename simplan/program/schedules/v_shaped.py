"""V-shaped schedules with a split backward: two stages per rank, down the ranks and back up."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape, number_microbatches

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def zb_v(shape: PipelineShape) -> Table:
    """Orders F, I and W such that no rank waits if all take equal time; rank r has stages r and 2p-1-r.

    Each rank holds activations of at most 2p of these half-size stages between F and W: the memory of 1F1B. Fewer than
    2p-1 microbatches leave gaps. torch's ScheduleZBVZeroBubble has the same order (Qi et al. 2024, arXiv:2401.10241,
    section 6).
    """
    assert shape.virtual_stages == 2, shape
    return tuple(_zb_v_row(rank, shape) for rank in range(shape.num_ranks))


def _zb_v_row(rank: int, shape: PipelineShape) -> tuple[Action, ...]:
    p, m = shape.num_ranks, max(shape.num_microbatches, 2 * shape.num_ranks - 1)
    down, up = rank, 2 * p - 1 - rank
    # the first microbatch is back from the last rank after 2(p-r)-1 forwards, and its gradient after r more of each
    # stage; in the end I goes before W until the last gradient has been sent on
    steps = [
        *(2 * (p - rank) - 1) * [(_F, down)],
        *rank * [(_F, up), (_F, down)],
        *(p - rank) * [(_F, up), (_I, up), (_W, up)],
        *(m - (2 * p - 1 - rank)) * [(_F, down), (_I, down), (_W, down), (_F, up), (_I, up), (_W, up)],
        *(p - 1 - rank) * [(_I, down), (_W, down), (_F, up), (_I, up), (_W, up)],
        *rank * [(_I, down), (_I, up)],
        *(p - rank) * [(_I, down), (_W, down)],
        *rank * [(_W, up)],
        *rank * [(_W, down)],
    ]
    return number_microbatches(steps, shape.num_microbatches)


def dualpipe_v(shape: PipelineShape) -> Table:
    """Alternates a forward of one stage with a backward of the other; rank r has stages r and 2p-1-r.

    Backward is split only at both ends of the step. Each rank holds activations of at most 2p+1 of these half-size
    stages between F and W, as published. The idle time is p-1 if F, I and W take one each. The forward and backward
    that DeepSeek's runtime overlaps are two actions here, the forward first. torch's ScheduleDualPipeV has the same
    order, but rejects fewer than 2p microbatches; here missing microbatches leave gaps. This is DeepSeek's DualPipe cut
    in half (DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe).
    """
    assert shape.virtual_stages == 2, shape
    return tuple(_dualpipe_v_row(rank, shape) for rank in range(shape.num_ranks))


def _dualpipe_v_row(rank: int, shape: PipelineShape) -> tuple[Action, ...]:
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
