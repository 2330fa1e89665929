"""DualPipeV: DeepSeek's DualPipe cut in half (DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.numbering import number_microbatches
from simplan.program.schedules.shape import PipelineShape

__all__ = ["dualpipe_v"]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def dualpipe_v(shape: PipelineShape) -> Table:
    """Rank r has stages r and 2p-1-r; a forward of one and a backward of the other in turn, split at both ends only.

    2p+1 of these half-size stages' activations on every rank at most, between F and W, as published; idle time p-1
    where F, I and W take one each. The forward and backward that DeepSeek's runtime does at once are two actions here,
    the forward first. torch's ScheduleDualPipeV has the same order, and refuses microbatches below 2p; here they leave
    gaps where the others would be.

    Args:
        shape: The pipeline; two stages a rank.
    """
    assert shape.virtual_stages == 2, shape
    return tuple(_row(rank, shape) for rank in range(shape.num_ranks))


def _row(rank: int, shape: PipelineShape) -> tuple[Action, ...]:
    p, m = shape.num_ranks, max(shape.num_microbatches, 2 * shape.num_ranks)
    down, up = rank, 2 * p - 1 - rank
    num_later = p - 1 - rank
    # in the second half of the drain only gradients that others wait for are made; their weights come last, in order
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
