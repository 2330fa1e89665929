"""A measurement or the values of a log, compared with the prediction of a scenario."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app import uploads
from app.results.plan import predicted
from simplan.program.timeline import Timeline
from simplan.runs.measurement import Measurement
from simplan.validate.compare import Comparison, compare
from simplan.validate.logged import LoggedComparison, compare_logged
from simplan.validate.logged_run import LoggedRun
from simplan.validate.measured import measured_timeline, predicted_timeline


@dataclass(frozen=True, slots=True)
class MeasuredResult:
    """Data of a comparison with a measurement.

    Attributes:
        comparison: The comparison.
        interval_s: 90 % interval of the predicted step time, in seconds.
        num_steps: Number of measured steps.
        predicted, measured: Both steps.
    """

    comparison: Comparison
    interval_s: tuple[float, float]
    num_steps: int
    predicted: Timeline
    measured: Timeline


def measured_result(text: str, calibrated_at: int, name: str, content: bytes) -> MeasuredResult | LoggedComparison:
    """Compares an uploaded measurement with the prediction of a scenario.

    Args:
        text, calibrated_at: See ``predicted``.
        name, content: Name and content of the uploaded file.

    Raises:
        SpecError: The file is no measurement, or one of another job.
    """
    measured = uploads.measured_of(name, content)
    prediction = predicted(text, calibrated_at)
    if isinstance(measured, LoggedRun):
        return compare_logged(prediction.to_json(), measured, prediction.job)
    comparison = compare(prediction, measured)
    return _result(comparison, prediction.step_time_interval_s, prediction.timeline, measured)


def result_of_files(prediction: dict[str, Any], measurement: Measurement) -> MeasuredResult:
    """Compares a measurement with the JSON document of a prediction.

    Raises:
        SpecError: The jobs differ, or the prediction is incomplete.
    """
    comparison = uploads.compared(prediction, measurement)
    low_s, high_s = prediction["step_time_interval_s"]
    return _result(comparison, (low_s, high_s), predicted_timeline(prediction), measurement)


def _result(
    comparison: Comparison, interval_s: tuple[float, float], timeline: Timeline, measurement: Measurement
) -> MeasuredResult:
    num_steps = len(measurement.step_times_s)
    return MeasuredResult(comparison, interval_s, num_steps, timeline, measured_timeline(measurement))
