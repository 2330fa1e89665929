"""A prediction next to a measurement: errors by term, both steps on one axis."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from app import uploads
from app.components.downloads import csv_text, download, show_figure
from app.components.problems import escaped
from app.figures.validation import steps_figure, terms_figure
from simplan.io import json_text
from simplan.report.logged import candidate_causes
from simplan.runs.measurement import Measurement
from simplan.units import format_percent, format_time
from simplan.validate.compare import Comparison
from simplan.validate.logged import LoggedRun
from simplan.validate.measured import measured_timeline, predicted_timeline

__all__ = ["show_comparison_of", "show_logged", "show_uploaded"]


def show_uploaded() -> None:
    """Shows the upload of both files."""
    left, right = st.columns(2)
    with left:
        prediction = st.file_uploader("prediction.json", type=["json"], key="prediction file")
    with right:
        measurement = st.file_uploader(
            "measurement.json, or what a log says", type=["json", "yaml", "yml"], key="measurement file"
        )
    if prediction is None or measurement is None:
        st.caption(
            "`simplan run SCENARIO -o FOLDER` writes both files. Of a run elsewhere a file with "
            "`step_times_s: [2.41, 2.39, 2.44]` and, if known, `peak_reserved_gib: 71.2` will do. Files are read as "
            "data and not stored; a measurement of another job than the prediction is an error."
        )
    predicted = None if prediction is None else uploads.prediction_of(prediction.name, prediction.getvalue())
    measured = None if measurement is None else uploads.measured_of(measurement.name, measurement.getvalue())
    if predicted is not None and measured is not None:
        if isinstance(measured, LoggedRun):
            show_logged(predicted, measured)
        else:
            show_comparison_of(predicted, measured)


def show_logged(prediction: dict[str, Any], logged: LoggedRun) -> None:
    """Values of a log next to the prediction: the error, and the terms that could explain it."""
    found = uploads.compared_logged(prediction, logged)
    step = found.rows[0]
    low_s, high_s = (format_time(seconds) for seconds in found.interval_s)
    cells = [
        ("Predicted step", format_time(step.predicted), f"{low_s} to {high_s} in 9 of 10 cases"),
        ("Measured step", format_time(step.measured), "As the log has it"),
        ("Error", f"{step.signed_error or 0:+.1%}", "Predicted over measured, less one"),
        ("Spread", "unknown" if step.spread is None else f"+/- {format_percent(step.spread)}", "Of the steps"),
        ("In the interval", "yes" if found.interval_holds else "no", "Whether the measured step lies in it"),
    ]
    for column, (label, value, about) in zip(st.columns(len(cells)), cells, strict=True):
        column.metric(label, value, help=about)
    show_figure(terms_figure(found.rows), "errors", alt="Errors next to the spread of the steps")
    st.subheader("What is least sure", help="Parts of the predicted critical path and what their prices may be off by")
    sentence = candidate_causes(found)
    st.caption(escaped(f"{sentence[0].upper()}{sentence[1:]}."))
    parts = [
        {
            "part": part.part,
            "predicted, ms": part.predicted_s * 1e3,
            "hidden by compute, ms": part.hidden_s * 1e3,
            "one standard deviation, ms": part.std_s * 1e3,
            "alone: times as long": part.times_as_long,
        }
        for part in found.parts
    ]
    st.dataframe(pd.DataFrame(parts).round(3), hide_index=True, placeholder="")
    st.caption(escaped(". ".join(found.notes)))
    with st.container(horizontal=True):
        download("Parts", "unsure parts", "csv", csv_text(parts))
        download("Comparison", "comparison", "json", lambda: json_text(found.to_json()))


def show_comparison_of(prediction: dict[str, Any], measurement: Measurement) -> None:
    """Prediction and measurement next to each other.

    Args:
        prediction: JSON document of a prediction.
        measurement: Measurement of the same job.

    Raises:
        SpecError: The jobs differ, or the prediction is incomplete.
    """
    found = uploads.compared(prediction, measurement)
    step = found.rows[0]
    low_s, high_s = prediction["step_time_interval_s"]
    cells = [
        (
            "Predicted step",
            format_time(step.predicted),
            f"{format_time(low_s)} to {format_time(high_s)} in 9 of 10 cases",
        ),
        ("Measured step", format_time(step.measured), f"Median of {len(measurement.step_times_s)} steps"),
        ("Error", f"{step.signed_error or 0:+.1%}", "Predicted over measured, less one"),
        ("Spread", "unknown" if step.spread is None else f"+/- {format_percent(step.spread)}", "Of the repeats"),
        ("In the interval", "yes" if found.interval_holds else "no", "Whether the measured step lies in it"),
        ("Actions", "as predicted" if found.structure_equal else "differ", "Actions and collectives, and their order"),
        ("Unexplained", format_time(abs(found.unexplained_s)), "Of the measured step, by no term; its own figure"),
    ]
    for column, (label, value, about) in zip(st.columns(len(cells)), cells, strict=True):
        column.metric(label, value, help=about)
    st.subheader("Errors by term", help="Grey: the spread of the repeats. Within it nothing can be read off an error")
    show_figure(terms_figure(found.rows), "errors by term", alt="Errors of all terms next to the spread of the repeats")
    st.subheader("One step of both", help="The measured step is the one with the median time")
    figure = steps_figure(predicted_timeline(prediction), measured_timeline(measurement))
    show_figure(figure, "predicted and measured step", alt="Both steps on one axis", zoom=True)
    rows = [
        {"term": row.name, "predicted": row.predicted, "measured": row.measured, "unit": row.unit}
        | {"error": row.signed_error, "spread": row.spread, "within the spread": row.within_spread}
        for row in found.rows
    ]
    with st.expander(f"All {len(rows)} terms"):
        st.dataframe(pd.DataFrame(rows), hide_index=True, placeholder="")
    _show_parts(found)
    st.caption(escaped(". ".join(found.notes)))
    with st.container(horizontal=True):
        download("Terms", "comparison", "csv", csv_text(rows))
        download("Comparison", "comparison", "json", lambda: json_text(found.to_json()))


def _show_parts(found: Comparison) -> None:
    """Terms of the error, and step breakdown per rank, in milliseconds."""
    terms = [
        {
            "part": term.part,
            "counted as": str(term.share),
            "predicted, ms": term.predicted_s * 1e3,
            "measured, ms": term.measured_s * 1e3,
            "difference, ms": term.difference_s * 1e3,
        }
        for term in found.terms
    ]
    with st.expander("Terms that sum to the error: what both critical paths are made of"):
        st.dataframe(pd.DataFrame(terms).round(3), hide_index=True)
    splits = [
        {"rank": split.rank, "share": str(share), "predicted, ms": split.predicted_s.get(share, 0.0) * 1e3}
        | {"measured, ms": split.measured_s.get(share, 0.0) * 1e3}
        for split in found.splits
        for share in dict.fromkeys((*split.predicted_s, *split.measured_s))
    ]
    with st.expander("Where the step of each rank went"):
        st.dataframe(pd.DataFrame(splits).round(3), hide_index=True)
    with st.container(horizontal=True):
        download("Additive terms", "terms of the error", "csv", csv_text(terms))
        download("Steps of ranks", "steps of ranks", "csv", csv_text(splits))
