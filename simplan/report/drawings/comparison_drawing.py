"""Drawing of a predicted and a measured step on one time axis, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from simplan.errors import Problem, SpecError
from simplan.program.timeline import COMPUTING
from simplan.report.drawings.drawing import Box, draw_timeline
from simplan.runs.measurement import Measurement
from simplan.validate.activity import ActivityShare, Piece, pieces_of, predicted_activity
from simplan.validate.measured import measured_timeline, predicted_timeline
from simplan.validate.measured_activity import measured_activity

_MAX_RANKS = 16
_STRIPES = (ActivityShare.EXPOSED_COMMUNICATION, ActivityShare.UNEXPLAINED)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One rank, predicted or measured.

    Attributes:
        rank: Global rank.
        source: Origin of the row.
        boxes: Actions of the rank.
        stripes: Exposed communication and unexplained time, between or inside of boxes; the rest is waiting.
        step_time_s: Step time of the rank in seconds.
    """

    rank: int
    source: Literal["predicted", "measured"]
    boxes: tuple[Box, ...]
    stripes: tuple[Piece, ...]
    step_time_s: float


@dataclass(frozen=True, slots=True)
class ComparisonDrawing:
    """Predicted and measured timelines of the ranks that both have.

    Attributes:
        name: Job name.
        rows: Two rows per rank, predicted first.
        num_hidden: Number of ranks that are not drawn.
    """

    name: str
    rows: tuple[ComparedRow, ...]
    num_hidden: int = 0

    @property
    def axis_s(self) -> float:
        """Length of the axis: the longer of the two steps."""
        return max(row.step_time_s for row in self.rows)


def draw_comparison(prediction: Mapping[str, Any], measurement: Measurement) -> ComparisonDrawing:
    """Drawing of a prediction's JSON document and of the recorded step of a measurement of the same job.

    Raises:
        SpecError: No rank computes in both.
    """
    predicted, measured = predicted_timeline(prediction), measured_timeline(measurement)
    activities = predicted_activity(predicted), measured_activity(measurement)
    computing = [{span.rank for span in side.spans if span.kind in COMPUTING} for side in (predicted, measured)]
    both = sorted(activities[0].keys() & activities[1].keys() & computing[0] & computing[1])
    if not both:
        raise SpecError(Problem(field="timeline", rule="has no rank with computation in prediction and measurement"))
    shown = both[:_MAX_RANKS]
    drawings = [draw_timeline("", timeline, shown) for timeline in (predicted, measured)]
    rows = []
    for index, rank in enumerate(shown):
        for source, drawing, activity in zip(("predicted", "measured"), drawings, activities, strict=True):
            end_s = drawing.step_time_s
            boxes = drawing.rows[index].boxes
            stripes = tuple(piece for piece in pieces_of(activity[rank], end_s) if piece.share in _STRIPES)
            rows.append(ComparedRow(rank, source, boxes, stripes, end_s))  # type: ignore[arg-type]
    return ComparisonDrawing(measurement.job.name, tuple(rows), len(both) - len(shown))
