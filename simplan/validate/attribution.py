"""Attribution of the step-time error to terms along the critical path, whose differences sum to the error."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simplan.program.timeline import Timeline
from simplan.runs.measurement import Measurement
from simplan.validate.activity import ActivityShare, Piece, pieces_of, predicted_activity
from simplan.validate.measured import times_recomputation
from simplan.validate.measured_activity import measured_activity


def critical_pieces(rows: Mapping[int, Sequence[Piece]], step_time_s: float) -> tuple[Piece, ...]:
    """Follow the critical path backward from the rank that ends last.

    At a wait or the start of a transfer, the path continues on the rank that arrived last. A wait without a known cause
    stays on the path.

    Args:
        rows: By rank, pieces of its step from 0 to ``step_time_s``.
        step_time_s: Step time in seconds.

    Returns:
        Pieces on the path, last first, cut to their part on the path; they sum to ``step_time_s``.
    """
    ends = {rank: [piece.end_s for piece in row] for rank, row in rows.items()}

    def at(rank: int, time_s: float) -> tuple[int, Piece]:
        """Index and piece just before a time."""
        index = min(bisect_left(ends[rank], time_s), len(ends[rank]) - 1)
        return index, rows[rank][index]

    rank = min(rows, key=lambda r: _idle_tail_s(rows[r]))
    now_s, jumps, path = step_time_s, 0, []
    while now_s > 0.0:
        index, piece = at(rank, now_s)
        if piece.share is ActivityShare.WAIT and jumps <= len(rows):
            following = rows[rank][index + 1] if index + 1 < len(rows[rank]) else None
            cause = None if following is None or following.transfer is None else following.transfer.last_rank
            if cause is not None and cause != rank and cause in rows:
                rank, jumps = cause, jumps + 1
                continue
        start_s = max(0.0, piece.start_s)
        path.append(Piece(start_s, now_s, piece.share, piece.part, piece.transfer))
        now_s, jumps = start_s, 0
        transfer = piece.transfer
        if transfer is not None and transfer.start_s == start_s and transfer.last_rank in rows:
            assert transfer.last_rank is not None
            rank = transfer.last_rank
    return tuple(path)


def _idle_tail_s(row: Sequence[Piece]) -> float:
    """Seconds of wait or unexplained time at the end of a rank's step."""
    tail_s = 0.0
    for piece in reversed(row):
        if piece.share not in (ActivityShare.WAIT, ActivityShare.UNEXPLAINED):
            break
        tail_s += piece.duration_s
    return tail_s


_OTHER_STEPS = "median step compared with the recorded step"
_MEAN_STEP = "mean step compared with a step with an outer step"


@dataclass(frozen=True, slots=True)
class TermDifference:
    """One term of the predicted and measured critical paths.

    Attributes:
        part: Name of the term, e.g. ``backward``.
        share: Share of the step that the term belongs to.
        predicted_s, measured_s: Seconds on the predicted and on the measured critical path; 0 if absent.
    """

    part: str
    share: ActivityShare
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Predicted minus measured."""
        return self.predicted_s - self.measured_s


@dataclass(frozen=True, slots=True)
class RankSplit:
    """Time split of a rank's step.

    Attributes:
        rank: Global rank.
        predicted_s, measured_s: Seconds by share; they sum to the predicted step and to the recorded step.
    """

    rank: int
    predicted_s: dict[ActivityShare, float]
    measured_s: dict[ActivityShare, float]


def attribute(
    predicted: Timeline, measurement: Measurement, step_time_s: float | None = None
) -> tuple[tuple[TermDifference, ...], tuple[RankSplit, ...]]:
    """Terms of the critical paths, largest difference first, and the time splits of all ranks.

    Unexplained time, and the difference of the recorded step to the median step, are terms of their own. Of replicas
    that train alone, a step with an outer step is recorded, and a term is its difference to the mean step. If the
    measurement does not separate recomputation from backward, both sides count it as backward. Without recorded actions
    there are no terms.

    Args:
        predicted: Timeline of the predicted step.
        measurement: Measurement of the same job.
        step_time_s: Predicted step time, of replicas that train alone the mean step; None for that of the timeline.
    """
    of_measured = measured_activity(measurement)
    recorded_s = max((busy.end_s for activity in of_measured.values() for busy in activity.busy), default=0.0)
    if not recorded_s:
        return (), ()
    of_predicted = predicted_activity(predicted, recompute_apart=times_recomputation(measurement))
    expected = {rank: pieces_of(activity, predicted.step_time_s) for rank, activity in of_predicted.items()}
    measured = {rank: pieces_of(activity, recorded_s) for rank, activity in of_measured.items()}
    predicted_terms = _by_part(critical_pieces(expected, predicted.step_time_s))
    dropped = {rank.rank for rank in measurement.ranks if rank.is_dropped}
    kept = {rank: pieces for rank, pieces in measured.items() if rank not in dropped}
    measured_terms = _by_part(critical_pieces(kept, recorded_s))
    others = _OTHER_STEPS if measurement.job.round_steps == 1 else _MEAN_STEP
    predicted_terms[others, ActivityShare.UNEXPLAINED] = (step_time_s or predicted.step_time_s) - predicted.step_time_s
    measured_terms[others, ActivityShare.UNEXPLAINED] = measurement.step_time_s - recorded_s
    terms = [
        TermDifference(part, share, predicted_terms.get((part, share), 0.0), measured_terms.get((part, share), 0.0))
        for part, share in dict.fromkeys((*predicted_terms, *measured_terms))
    ]
    splits = tuple(
        RankSplit(rank, _by_share(expected[rank]), _by_share(measured[rank]))
        for rank in sorted(expected.keys() & measured)
    )
    return tuple(sorted(terms, key=lambda term: -abs(term.difference_s))), splits


def _by_part(pieces: Sequence[Piece]) -> dict[tuple[str, ActivityShare], float]:
    seconds: dict[tuple[str, ActivityShare], float] = defaultdict(float)
    for piece in pieces:
        seconds[piece.part, piece.share] += piece.duration_s
    return seconds


def _by_share(pieces: Sequence[Piece]) -> dict[ActivityShare, float]:
    seconds = dict.fromkeys(ActivityShare, 0.0)
    for piece in pieces:
        seconds[piece.share] += piece.duration_s
    return seconds
