"""Predictions compared with measurements: data, and a figure of errors by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app import uploads
from app.figures.style import CATEGORIES, MUTED, PLANS, Figure, bar, empty, figure
from app.jobs.job import Report, Update
from app.predictions import predicted
from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.predict_runs import predict_runs
from simplan.accuracy.run import ReadFile
from simplan.job import Job
from simplan.report.drawings.comparison_drawing import draw_comparison
from simplan.report.drawings.comparison_svg import comparison_svg
from simplan.runs.measurement import Measurement
from simplan.units import format_number
from simplan.validate.compare import Comparison, compare
from simplan.validate.logged import LoggedComparison, compare_logged
from simplan.validate.logged_run import LoggedRun
from simplan.validate.prediction_file import check_prediction
from simplan.validate.rows import ComparisonRow


def predict_published(files: list[ReadFile], report: Report) -> tuple[RunOutcome, ...]:
    """Outcomes of published runs; reports progress."""

    def on_progress(done: int, of: int) -> None:
        report(Update(done, of, "predicting"))

    return tuple(predict_runs(files, on_progress=on_progress))


@dataclass(frozen=True, slots=True)
class MeasuredResult:
    """Data of a comparison with a measurement.

    Attributes:
        comparison: The comparison.
        interval_s: 90 % interval of the predicted step time, in seconds.
        num_steps: Number of measured steps.
        svg: Drawing of both steps.
    """

    comparison: Comparison
    interval_s: tuple[float, float]
    num_steps: int
    svg: str


def measured_result(text: str, calibrated_at: int, name: str, content: bytes) -> MeasuredResult | LoggedComparison:
    """Compares an uploaded measurement with the prediction of a scenario.

    Args:
        text, calibrated_at: See ``predicted_step``.
        name, content: Name and content of the uploaded file.

    Raises:
        SpecError: The file is no measurement, or one of another job.
    """
    measured = uploads.measured_of(name, content)
    prediction = predicted(text, calibrated_at)
    return _compared(prediction.to_json(), measured, prediction.job)


def result_of_files(
    prediction: Mapping[str, Any], measured: Measurement | LoggedRun
) -> MeasuredResult | LoggedComparison:
    """Compares a measurement, or the values of a log, with the JSON document of a prediction.

    Raises:
        SpecError: The jobs differ, or the prediction is damaged.
    """
    check_prediction(prediction, "prediction")
    return _compared(prediction, measured)


def _compared(
    prediction: Mapping[str, Any], measured: Measurement | LoggedRun, job: Job | None = None
) -> MeasuredResult | LoggedComparison:
    if isinstance(measured, LoggedRun):
        return compare_logged(prediction, measured, job)
    comparison = compare(prediction, measured)
    low_s, high_s = prediction["step_time_interval_s"]
    svg = comparison_svg(draw_comparison(prediction, measured))
    return MeasuredResult(comparison, (low_s, high_s), len(measured.step_times_s), svg)


def terms_figure(rows: Sequence[ComparisonRow]) -> Figure:
    """Signed errors as bars, over the spread of the repeats around zero."""
    shown = [row for row in rows if row.signed_error is not None]
    if not shown:
        return empty("No term was both measured and predicted.")
    spreads = [100 * (row.spread or 0.0) for row in shown]
    names = [f"{row.name} " for row in shown]
    repeats = bar(
        orientation="h",
        name="spread of the repeats",
        x=[2 * spread for spread in spreads],
        base=[-spread for spread in spreads],
        y=names,
        marker={"color": "rgba(138,143,152,0.3)"},
        width=0.8,
        hoverinfo="skip",
    )
    errors = bar(
        orientation="h",
        name="error",
        x=[100 * (row.signed_error or 0.0) for row in shown],
        y=names,
        width=0.4,
        marker={"color": [MUTED if row.within_spread else PLANS[0] for row in shown]},
        customdata=[
            [f"{format_number(row.predicted)} {row.unit}", f"{format_number(row.measured)} {row.unit}"] for row in shown
        ],
        hovertemplate="%{y}: predicted %{customdata[0]}, measured %{customdata[1]}: %{x:+.1f} %<extra></extra>",
    )
    return figure(
        [repeats, errors],
        height=90 + 26 * len(shown),
        barmode="overlay",
        xaxis={"title": "(predicted - measured) / measured, %"},
        yaxis=CATEGORIES,
    )
