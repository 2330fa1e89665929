"""Time of a pass through layers on one rank, including exposed collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from simplan.program.lowering.script import Segment
from simplan.program.program import LayerWork, Message

__all__ = ["pass_time_s"]


def pass_time_s(
    segments: Iterable[Segment],
    groups: Mapping[str, tuple[int, ...]],
    work_s: Callable[[LayerWork], float],
    message_s: Callable[[Message], float],
    free: Set[str] = frozenset(),
) -> float:
    """Returns the seconds of all compute, and of collectives beyond the GEMMs with which they overlap.

    Args:
        segments: Segments of the pass, in order.
        groups: Axis -> ranks of its collectives.
        work_s, message_s: Cost estimates in seconds.
        free: Axes whose collectives count as zero-cost.
    """
    total_s = hidden_s = 0.0
    for segment in segments:
        total_s += sum(map(work_s, segment.work))
        exchange = segment.exchange
        if exchange is None or exchange.axis in free:
            continue
        if segment.beside is not None or not exchange.beside:
            hidden_s = 0.0 if segment.beside is None else work_s(segment.beside)
        exchange_s = message_s(exchange.among(groups[exchange.axis]))
        total_s += max(0.0, exchange_s - hidden_s)
        hidden_s = max(0.0, hidden_s - exchange_s)
    return total_s
