"""Which terms make a predicted step differ from a measured one: additive, so that nothing is left over unsaid."""

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
    """One thing that both critical paths may hold.

    Attributes:
        part: What it is, e.g. ``backward``.
        share: Which share of a step it belongs to.
        predicted_s, measured_s: Time on either critical path.
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
    """Where a rank's step goes.

    Attributes:
        rank: Global rank.
        predicted_s, measured_s: Time by share; each sums to its step, the recorded one for what was measured.
    """

    rank: int
    predicted_s: dict[ActivityShare, float]
    measured_s: dict[ActivityShare, float]


def attribute(
    predicted: Timeline, measurement: Measurement
) -> tuple[tuple[TermDifference, ...], tuple[RankSplit, ...]]:
    """Terms of the critical paths, largest difference first, and the splits of all ranks.

    What is left unexplained, and how the recorded step differs from the median, are terms of their own. Where the
    measurement does not tell recomputation from the rest of a backward, it is a part of that on both sides.

    Args:
        predicted: The predicted step.
        measurement: A run of the same job with recorded actions; else there are no terms.
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
