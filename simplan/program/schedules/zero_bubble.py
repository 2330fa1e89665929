"""ZB-H1 and ZB-H2: backward in two parts, in a fixed order (Qi et al. 2024, arXiv:2401.10241, section 2, figure 3)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(shape: PipelineShape) -> Table:
    """1F1B with I in the place of B; the Ws come later, the later the rank, and fill the gaps at the end.

    Idle time (p-1)(F+I-W), where W is no longer than F and m >= p; 1F1B has (p-1)(F+I+W). Rank r has p-r microbatches
    between F and I at most, as 1F1B has, and every rank p between F and W, as many as the first rank of 1F1B.

    Args:
        shape: The pipeline; one stage a rank.
    """
    p = shape.num_ranks
    return tuple(_row(rank, shape, num_warmup=p - rank, lag=rank) for rank in range(p))


def zb_h2(shape: PipelineShape) -> Table:
    """As ZB-H1, but with forwards up to the first backward, so that no rank waits for it.

    Idle time (p-1)(F+I-2W), where W is no longer than F and I and m >= 2p-1: none where all take as long. Almost twice
    the memory: rank r has 2(p-r)-1 microbatches between F and I at most, and every rank 2p-1 between F and W.

    Args:
        shape: The pipeline; one stage a rank.
    """
    p = shape.num_ranks
    return tuple(_row(rank, shape, num_warmup=2 * (p - rank) - 1, lag=2 * rank) for rank in range(p))


def _row(rank: int, shape: PipelineShape, *, num_warmup: int, lag: int) -> tuple[Action, ...]:
    """Forwards, then I, the W of the microbatch ``lag`` before it, and the next forward in turn, then the last Ws."""
    assert shape.virtual_stages == 1, shape
    m = shape.num_microbatches
    row = [Action(rank, ActionKind.FORWARD, microbatch) for microbatch in range(min(num_warmup, m))]
    for microbatch in range(m):
        row.append(Action(rank, ActionKind.BACKWARD_INPUT, microbatch))
        if microbatch >= lag:
            row.append(Action(rank, ActionKind.BACKWARD_WEIGHT, microbatch - lag))
        if microbatch + num_warmup < m:
            row.append(Action(rank, ActionKind.FORWARD, microbatch + num_warmup))
    row += (Action(rank, ActionKind.BACKWARD_WEIGHT, microbatch) for microbatch in range(max(0, m - lag), m))
    return tuple(row)
