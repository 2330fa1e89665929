"""Time of a pass through layers on one rank, including exposed collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from simplan.program.lowering.script import Segment
from simplan.program.program import Communication, LayerWork

__all__ = ["pass_time_s"]


def pass_time_s(
    segments: Iterable[Segment],
    groups: Mapping[str, tuple[int, ...]],
    work_s: Callable[[LayerWork], float],
    communication_s: Callable[[Communication], float],
    free: Set[str] = frozenset(),
) -> float:
    """Returns the seconds of all compute, and of collectives beyond the GEMMs with which they overlap.

    Args:
        segments: Segments in order.
        groups: Axis -> ranks of its collectives.
        work_s, communication_s: Cost estimates in seconds.
        free: Axes whose collectives count as zero-cost.
    """
    total_s = hidden_s = 0.0
    for segment in segments:
        total_s += sum(map(work_s, segment.work))
        collective = segment.collective
        if collective is None or collective.axis in free:
            continue
        if segment.beside is not None or not collective.beside:
            hidden_s = 0.0 if segment.beside is None else work_s(segment.beside)
        exchange_s = communication_s(collective.among(groups[collective.axis]))
        total_s += max(0.0, exchange_s - hidden_s)
        hidden_s = max(0.0, hidden_s - exchange_s)
    return total_s
