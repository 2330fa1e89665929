"""Timelines: spans on the streams of ranks, in one format for predictions and measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import eq
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T")


class LazySequence(Sequence[_T]):
    """A sequence whose items are created on access.

    Args:
        keys: One number per item.
        create: Returns the item of a number.
    """

    def __init__(self, keys: Sequence[int] | NDArray[np.int64], create: Callable[[int], _T]) -> None:
        self._keys, self._create = keys, create

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[_T, ...]: ...
    def __getitem__(self, index: int | slice) -> _T | tuple[_T, ...]:
        if isinstance(index, slice):
            return tuple(map(self._create, map(int, self._keys[index])))
        return self._create(int(self._keys[index]))

    def __iter__(self) -> Iterator[_T]:
        return map(self._create, map(int, self._keys))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple of the same items, which hashes otherwise


class SpanKind(StrEnum):
    """Categories of time in the breakdown of a step."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    HOST = "host"


_KINDS = tuple(SpanKind)

COMPUTING = frozenset({SpanKind.COMPUTE, SpanKind.RECOMPUTE})
"""Kinds that count as compute when idle time is measured."""


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of activity on a stream.

    Attributes:
        stream: ``compute`` or the name of a communication stream.
        name: Name of the operation, e.g. ``0F1``, ``all_reduce bucket 2``.
        action: The action that the span belongs to, in text form.
        kind: Category of the span's time.
        start_s: Start, seconds from the start of the step.
        end_s: End, seconds from the start of the step.
        num_bytes: Bytes moved by communication; 0 for other spans.
        peer: The other rank of a send or receive; None for other spans.
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
    """All spans of one step, in no particular order.

    Attributes:
        step_time_s: Seconds from the start of the step to the end of the last rank.
        ranks: ``(num_spans,)`` Rank of each span, for spans that are created on access; None for others.
    """

    spans: Sequence[Span]
    num_ranks: int
    step_time_s: float
    ranks: NDArray[np.integer] | None = field(default=None, compare=False, repr=False)

    def by_rank(self, ranks: Collection[int] | None = None) -> dict[int, list[Span]]:
        """Rank -> its spans, of some ranks or of all."""
        spans: Iterable[Span] = self.spans
        if ranks is not None and self.ranks is not None:
            spans = map(self.spans.__getitem__, np.flatnonzero(np.isin(self.ranks, [*ranks])).tolist())
        found: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if ranks is None or span.rank in ranks:
                found[span.rank].append(span)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Start and end of every operation of a Program, ``(num_ops,)`` seconds; indices are those of ``Program.ops``."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @property
    def step_time_s(self) -> float:
        """The end of the last operation, in seconds."""
        return float(self.end_s.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Split:
    """Breakdown of one rank's step time: exclusive parts in seconds that sum to the step.

    Attributes:
        compute_s: Forward and backward, without recomputation.
        recompute_s: Forward recomputed for the backward pass.
        exposed_communication_s: Communication of this rank on any stream while its compute stream is idle.
        wait_s: Remaining idle time: pipeline bubble, or waiting for a late peer.
        host_s: Time on the compute stream spent waiting for the host.
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
        """Sum of the parts: the step time."""
        return (
            self.compute_s
            + self.recompute_s
            + self.exposed_communication_s
            + self.wait_s
            + self.host_s
            + self.optimizer_s
        )


def split_of_rank(spans: Iterable[Span], step_time_s: float) -> Split:
    """Computes the breakdown of one rank's step; see ``split_of_times``.

    Args:
        spans: Spans of one rank; those on ``compute`` do not overlap.
    """
    listed = list(spans)
    kinds = np.array([_KINDS.index(span.kind) for span in listed], np.int64)
    on_compute = np.array([span.stream == "compute" for span in listed], np.bool_)
    start_s, end_s = (np.array([getattr(span, name) for span in listed], np.float64) for name in ("start_s", "end_s"))
    return split_of_times(kinds, on_compute, start_s, end_s, step_time_s)


def split_of_times(
    kinds: NDArray[np.integer],
    on_compute: NDArray[np.bool_],
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    step_time_s: float,
) -> Split:
    """Computes the breakdown of one rank's step.

    Time on the compute stream counts as its kind. Gaps covered by communication of this rank are exposed communication;
    the remaining gaps are wait.

    Args:
        kinds: ``(spans,)`` Indices into ``tuple(SpanKind)``.
        on_compute: ``(spans,)`` True for spans on the compute stream, which do not overlap.
        start_s, end_s: ``(spans,)`` Start and end in seconds.
    """
    busy = on_compute & (kinds != _KINDS.index(SpanKind.COMMUNICATION))
    by_kind_s = np.bincount(kinds[busy], (end_s - start_s)[busy], len(_KINDS))
    of_kind = dict(zip(_KINDS, by_kind_s.tolist(), strict=True))
    compute_s = float(by_kind_s.sum())
    exposed_s = max(0.0, covered_s(start_s, end_s) - covered_s(start_s[busy], end_s[busy]))
    return Split(
        compute_s=of_kind[SpanKind.COMPUTE],
        recompute_s=of_kind[SpanKind.RECOMPUTE],
        exposed_communication_s=exposed_s,
        wait_s=max(0.0, step_time_s - compute_s - exposed_s),  # rounding must not make it negative
        host_s=of_kind[SpanKind.HOST],
        optimizer_s=of_kind[SpanKind.OPTIMIZER],
    )


def covered_s(start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> float:
    """Returns the seconds covered by at least one of the intervals."""
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s, kind="stable")
    begins_s, latest_s = start_s[order], np.maximum.accumulate(end_s[order])
    before_s = np.concatenate([begins_s[:1], latest_s[:-1]])
    return float((latest_s - np.maximum(begins_s, before_s)).clip(min=0.0).sum())
