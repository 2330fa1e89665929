"""Attribution of the step-time error to terms whose differences sum to the error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from simplan.program.timeline import Timeline
from simplan.runs.measurement import Measurement
from simplan.validate.activity import ActivityShare, Piece, pieces_of, predicted_activity
from simplan.validate.measured import times_recomputation
from simplan.validate.measured_activity import measured_activity
from simplan.validate.path import critical_pieces

__all__ = ["RankSplit", "TermDifference", "attribute"]

_OTHER_STEPS = "the median step beside the one that was recorded"


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
    predicted: Timeline, measurement: Measurement
) -> tuple[tuple[TermDifference, ...], tuple[RankSplit, ...]]:
    """Terms of the critical paths, largest difference first, and the time splits of all ranks.

    Unexplained time, and the difference of the recorded step to the median step, are terms of their own. If the
    measurement does not separate recomputation from backward, both sides count it as backward. Without recorded actions
    there are no terms.
    """
    of_measured = measured_activity(measurement)
    recorded_s = max((busy.end_s for activity in of_measured.values() for busy in activity.busy), default=0.0)
    if not recorded_s:
        return (), ()
    of_predicted = predicted_activity(predicted, recompute_apart=times_recomputation(measurement))
    expected = {rank: pieces_of(activity, predicted.step_time_s) for rank, activity in of_predicted.items()}
    found = {rank: pieces_of(activity, recorded_s) for rank, activity in of_measured.items()}
    predicted_terms = _by_part(critical_pieces(expected, predicted.step_time_s))
    measured_terms = _by_part(critical_pieces(found, recorded_s))
    measured_terms[_OTHER_STEPS, ActivityShare.UNEXPLAINED] = measurement.step_time_s - recorded_s
    terms = [
        TermDifference(part, share, predicted_terms.get((part, share), 0.0), measured_terms.get((part, share), 0.0))
        for part, share in dict.fromkeys((*predicted_terms, *measured_terms))
    ]
    splits = tuple(
        RankSplit(rank, _by_share(expected[rank]), _by_share(found[rank])) for rank in sorted(expected.keys() & found)
    )
    return tuple(sorted(terms, key=lambda term: -abs(term.difference_s))), splits


def _by_part(pieces: Sequence[Piece]) -> dict[tuple[str, ActivityShare], float]:
    found: dict[tuple[str, ActivityShare], float] = defaultdict(float)
    for piece in pieces:
        found[piece.part, piece.share] += piece.duration_s
    return found


def _by_share(pieces: Sequence[Piece]) -> dict[ActivityShare, float]:
    found = dict.fromkeys(ActivityShare, 0.0)
    for piece in pieces:
        found[piece.share] += piece.duration_s
    return found
