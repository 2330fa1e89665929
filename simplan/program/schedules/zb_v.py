"""ZB-V: two stages per rank, down the ranks and back up (Qi et al. 2024, arXiv:2401.10241, section 6)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.numbering import number_microbatches
from simplan.program.schedules.shape import PipelineShape

__all__ = ["zb_v"]

_F, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def zb_v(shape: PipelineShape) -> Table:
    """Orders F, I and W such that no rank waits if all take equal time; rank r has stages r and 2p-1-r.

    Each rank holds activations of at most 2p of these half-size stages between F and W: the memory of 1F1B. Fewer than
    2p-1 microbatches leave gaps. torch's ScheduleZBVZeroBubble has the same order.

    Args:
        shape: The pipeline; two stages per rank.
    """
    assert shape.virtual_stages == 2, shape
    return tuple(_row(rank, shape) for rank in range(shape.num_ranks))


def _row(rank: int, shape: PipelineShape) -> tuple[Action, ...]:
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
