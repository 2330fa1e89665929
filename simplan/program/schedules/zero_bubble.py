"""ZB-H1 and ZB-H2: split backward in a fixed order (Qi et al. 2024, arXiv:2401.10241, section 2, figure 3)."""

from __future__ import annotations

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(shape: PipelineShape) -> Table:
    """1F1B with I in place of B; W lags by the rank number in microbatches, and fills the gaps at the end.

    Idle time (p-1)(F+I-W), if W is no longer than F and m >= p; 1F1B has (p-1)(F+I+W). Rank r holds at most p-r
    microbatches between F and I, as in 1F1B. Every rank holds at most p between F and W, like the first rank of 1F1B.

    Args:
        shape: The pipeline; one stage per rank.
    """
    p = shape.num_ranks
    return tuple(_row(rank, shape, num_warmup=p - rank, lag=rank) for rank in range(p))


def zb_h2(shape: PipelineShape) -> Table:
    """ZB-H1 with more warm-up forwards, up to the first backward, so that no rank waits for it.

    Idle time (p-1)(F+I-2W), if W is no longer than F and I and m >= 2p-1: zero if all take equal time. The memory is
    almost double: rank r holds at most 2(p-r)-1 microbatches between F and I, and every rank 2p-1 between F and W.

    Args:
        shape: The pipeline; one stage per rank.
    """
    p = shape.num_ranks
    return tuple(_row(rank, shape, num_warmup=2 * (p - rank) - 1, lag=2 * rank) for rank in range(p))


def _row(rank: int, shape: PipelineShape, *, num_warmup: int, lag: int) -> tuple[Action, ...]:
    """Runs forwards, then in turn I, the W ``lag`` microbatches behind it, and the next forward, then remaining Ws."""
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
