"""When everything happened: spans on the streams of ranks, predicted or measured, in one shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["COMPUTING", "Span", "SpanKind", "Split", "Timeline", "split_of_rank"]


class SpanKind(StrEnum):
    """What a span's time counts as in the split of a step."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    HOST = "host"


COMPUTING = frozenset({SpanKind.COMPUTE, SpanKind.RECOMPUTE})
"""Kinds that count as work when idle time is measured."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran.

    Attributes:
        rank: Global rank.
        stream: ``compute`` or the name of a communication stream.
        name: What ran, e.g. ``0F1``, ``all_reduce bucket 2``.
        action: The Level 1 action it belongs to, in text form.
        kind: What its time counts as.
        start_s: Start, seconds from the start of the step.
        end_s: End.
        num_bytes: Bytes moved, for communication.
        peer: The other rank of a send or receive.
    """

    rank: int
    stream: str
    name: str
    action: str
    kind: SpanKind
    start_s: float
    end_s: float
    num_bytes: int = 0
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of one step.

    Attributes:
        spans: In no particular order.
        num_ranks: Ranks that took part.
        step_time_s: From 0 to the end of the last rank.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    step_time_s: float

    def by_rank(self) -> dict[int, list[Span]]:
        """Rank -> its spans."""
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.rank].append(span)
        return found

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Spans of one rank."""
        return tuple(span for span in self.spans if span.rank == rank)


@dataclass(frozen=True, slots=True)
class Split:
    """Where one rank's step went: exclusive shares that sum to the step, seconds.

    Attributes:
        compute_s: Forward and backward.
        recompute_s: Forward run again for the backward pass.
        exposed_communication_s: Bytes of this rank move while it computes nothing, on whatever stream.
        wait_s: Bubble, a late peer.
        host_s: The host is behind.
        optimizer_s: The optimizer step.
    """

    compute_s: float
    recompute_s: float
    exposed_communication_s: float
    wait_s: float
    host_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Sum of the shares: the step time."""
        return (
            self.compute_s
            + self.recompute_s
            + self.exposed_communication_s
            + self.wait_s
            + self.host_s
            + self.optimizer_s
        )


def split_of_rank(spans: Iterable[Span], step_time_s: float) -> Split:
    """Splits one rank's step.

    Time on the compute stream counts as its kind. Of the gaps, what a communication span of this rank covers is
    exposed communication, the rest is wait.

    Args:
        spans: Spans of one rank; those on ``compute`` do not overlap.
        step_time_s: Length of the step.
    """
    by_kind = dict.fromkeys(SpanKind, 0.0)
    busy: list[tuple[float, float]] = []
    moving: list[tuple[float, float]] = []
    for span in spans:
        if span.stream == "compute" and span.kind is not SpanKind.COMMUNICATION:
            by_kind[span.kind] += span.end_s - span.start_s
            busy.append((span.start_s, span.end_s))
        else:
            moving.append((span.start_s, span.end_s))
    covered = _measure(_union(busy + moving))
    compute_total = sum(by_kind.values())
    exposed = max(0.0, covered - _measure(_union(busy)))
    return Split(
        compute_s=by_kind[SpanKind.COMPUTE],
        recompute_s=by_kind[SpanKind.RECOMPUTE],
        exposed_communication_s=exposed,
        wait_s=max(0.0, step_time_s - compute_total - exposed),  # rounding must not make it negative
        host_s=by_kind[SpanKind.HOST],
        optimizer_s=by_kind[SpanKind.OPTIMIZER],
    )


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _measure(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
