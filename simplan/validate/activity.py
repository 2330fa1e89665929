"""Activity of a rank over a step, predicted or measured, as pieces without gaps or overlap.

A piece is compute, exposed communication, or wait. Communication starts once the last member of the collective or P2P
send has arrived; earlier time of the other members is wait. Measured time without any recorded activity is unexplained;
predictions have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from simplan.program.action import Action, ActionKind
from simplan.program.program import Stream
from simplan.program.timeline import Span, SpanKind, Timeline

UNEXPLAINED = "unexplained"
"""Part name of unexplained pieces."""

_WAITING = "waiting"
_NO_TIME_S = 1e-12


class ActivityShare(StrEnum):
    """Exclusive shares of a rank's step: those of ``Split``, and unexplained time."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    EXPOSED_COMMUNICATION = "exposed_communication"
    WAIT = "wait"
    HOST = "host"
    OPTIMIZER = "optimizer"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Busy:
    """Interval of work on the compute stream."""

    start_s: float
    end_s: float
    share: ActivityShare
    part: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """Interval of communication on a rank.

    Attributes:
        start_s: Arrival of the last member, in seconds.
        end_s: Completion on this rank, in seconds.
        part: Name of the communication.
        last_rank: Member that arrived last; None if no rank had to be waited for.
    """

    start_s: float
    end_s: float
    part: str
    last_rank: int | None = None


@dataclass(slots=True)
class Activity:
    """Recorded or predicted activity of a rank's step.

    Attributes:
        busy: Work on the compute stream, in time order, without overlap.
        transfers: Communication, in any order.
        waiting: Intervals of wait for other ranks; compute and communication inside them take precedence.
        idle: Share of all remaining time.
    """

    busy: list[Busy] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    waiting: list[tuple[float, float]] = field(default_factory=list)
    idle: ActivityShare = ActivityShare.WAIT


@dataclass(frozen=True, slots=True)
class Piece:
    """Interval of a rank's step with one activity.

    Attributes:
        start_s, end_s: Start and end in seconds.
        share: Share of the step that the piece counts as.
        part: Name of the activity, e.g. ``backward``; the same for all stages, since equal stages are interchangeable
            on a critical path.
        transfer: Communication that the piece belongs to; None for other pieces.
    """

    start_s: float
    end_s: float
    share: ActivityShare
    part: str
    transfer: Transfer | None = None

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


def pieces_of(activity: Activity, step_time_s: float) -> tuple[Piece, ...]:
    """Pieces of a rank's step, from 0 to its end."""
    pieces: list[Piece] = []
    now_s = 0.0
    transfers = sorted(activity.transfers, key=lambda transfer: transfer.start_s)
    for busy in activity.busy:
        start_s = max(busy.start_s, now_s)
        if busy.end_s <= start_s:
            continue
        pieces += _gap(now_s, start_s, transfers, activity)
        pieces.append(Piece(start_s, busy.end_s, busy.share, busy.part))
        now_s = busy.end_s
    pieces += _gap(now_s, step_time_s, transfers, activity)
    return tuple(pieces)


def _gap(start_s: float, end_s: float, transfers: Sequence[Transfer], activity: Activity) -> list[Piece]:
    """Pieces between two compute intervals; of overlapping transfers, the last to start counts."""
    if end_s <= start_s:
        return []
    inside = [t for t in transfers if t.start_s < end_s and t.end_s > start_s]
    waits = [(low, high) for low, high in activity.waiting if low < end_s and high > start_s]
    times = {start_s, end_s}
    times.update(time for t in inside for time in (t.start_s, t.end_s))
    times.update(time for interval in waits for time in interval)
    pieces: list[Piece] = []
    for low, high in pairwise(sorted(time for time in times if start_s <= time <= end_s)):
        moving = next((t for t in reversed(inside) if t.start_s <= low and t.end_s >= high), None)
        if moving is not None:
            piece = Piece(low, high, ActivityShare.EXPOSED_COMMUNICATION, moving.part, moving)
        elif any(first <= low and last >= high for first, last in waits):
            piece = Piece(low, high, ActivityShare.WAIT, _WAITING)
        else:
            piece = Piece(low, high, activity.idle, _WAITING if activity.idle is ActivityShare.WAIT else UNEXPLAINED)
        before = pieces[-1] if pieces else None
        if before is not None and (before.share, before.part, before.transfer) == (
            piece.share,
            piece.part,
            piece.transfer,
        ):
            piece = Piece(before.start_s, piece.end_s, piece.share, piece.part, piece.transfer)
            pieces.pop()
        pieces.append(piece)
    return pieces


_SHARES = {
    SpanKind.COMPUTE: ActivityShare.COMPUTE,
    SpanKind.OPTIMIZER: ActivityShare.OPTIMIZER,
}
_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
    ActionKind.REDUCE_GRAD: "scaling gradients",
    ActionKind.OPTIM: "optimizer",
}
CLIPPING = "gradient clipping"
"""Part name of the compute before the update in OPTIM."""
_STREAMS = {
    **dict.fromkeys((Stream.SEND_F, Stream.RECV_F, Stream.SEND_B, Stream.RECV_B), "P2P between stages"),
    **dict.fromkeys((Stream.DATA, Stream.SHARD, Stream.REPLICATE), "data-parallel communication"),
    **dict.fromkeys((Stream.TO_HOST, Stream.FROM_HOST), "copies to and from the host"),
    Stream.TENSOR: "tensor-parallel communication",
    Stream.CONTEXT: "context-parallel communication",
    Stream.EXPERT: "expert-parallel communication",
    Stream.EXPERT_DATA: "data-parallel communication of experts",
    Stream.TIED: "all-reduce of the tied embedding",
    Stream.PIPELINE: "all-reduce of the gradient norm over stages",
}


def busy_span(action: str, kind: SpanKind, start_s: float, end_s: float) -> Busy:
    """Convert a span of the compute stream; a part belongs to one share."""
    if kind is SpanKind.RECOMPUTE:
        return Busy(start_s, end_s, ActivityShare.RECOMPUTE, "recomputation")
    if kind is SpanKind.HOST:
        return Busy(start_s, end_s, ActivityShare.HOST, "the host")
    parsed = Action.parse(action).kind
    clips = parsed is ActionKind.OPTIM and kind is SpanKind.COMPUTE
    return Busy(start_s, end_s, _SHARES[kind], CLIPPING if clips else _WORDS.get(parsed, str(parsed)))


def stream_words(stream: str) -> str:
    """Name of the communication on a stream; the same for sender and receiver.

    >>> stream_words("send_f"), stream_words("data_parallel")
    ('P2P between stages', 'data-parallel communication')
    """
    return _STREAMS[Stream(stream)]


def predicted_activity(timeline: Timeline, *, recompute_apart: bool = True) -> dict[int, Activity]:
    """Activity by rank of a predicted step; ``recompute_apart`` False counts recomputation as part of backward.

    Members of a collective have spans with equal times; the last to arrive is the rank that computed until then.
    """
    activities: dict[int, Activity] = defaultdict(Activity)
    moving: dict[tuple[float, float, int], list[Span]] = defaultdict(list)
    ends: dict[int, list[float]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        if span.kind is SpanKind.COMMUNICATION:
            moving[span.start_s, span.end_s, span.num_bytes].append(span)
        else:
            merged = span.kind is SpanKind.RECOMPUTE and not recompute_apart
            kind = SpanKind.COMPUTE if merged else span.kind
            activities[span.rank].busy.append(busy_span(span.action, kind, span.start_s, span.end_s))
            ends[span.rank].append(span.end_s)
    for spans in moving.values():
        last = _last_of(spans, ends)
        for span in spans:
            transfer = Transfer(span.start_s, span.end_s, stream_words(span.stream), last)
            activities[span.rank].transfers.append(transfer)
    return dict(activities)


def _last_of(spans: Sequence[Span], ends: Mapping[int, Iterable[float]]) -> int | None:
    """Rank that computed until the collective began; None if there is none."""
    start_s = spans[0].start_s
    near_s = _NO_TIME_S + 1e-9 * start_s
    ending = (span.rank for span in spans if any(abs(end_s - start_s) <= near_s for end_s in ends.get(span.rank, ())))
    return next(ending, None)
