"""Comparison of a prediction with a measurement or with the values of a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from app import result_cache, state, uploads
from app.awaited import awaited
from app.components.elements import csv_text, download, show_figure, show_metrics, show_table
from app.components.scenario_form import show_scenario_form
from app.fields import remembered_choice
from app.figures.validation import steps_figure, terms_figure
from app.page import escaped
from app.results.measured import MeasuredResult, measured_result, result_of_files
from simplan.io import json_text
from simplan.report.comparison import candidate_causes
from simplan.units import counted, format_percent, format_time
from simplan.validate.compare import Comparison
from simplan.validate.logged import LoggedComparison
from simplan.validate.logged_run import LoggedRun

_SOURCES = {"scenario": "current scenario", "file": "uploaded file"}
_MAX_UPLOAD_MIB = uploads.MAX_BYTES // 2**20


def show_uploaded() -> None:
    """Comparison of an uploaded measurement with the current scenario's prediction, or with an uploaded one."""
    left, right = st.columns(2)
    with left:
        source = remembered_choice("Prediction", "prediction", list(_SOURCES), "scenario", format_func=_SOURCES.get)
    if source == "scenario":
        show_scenario_form()
    with right:
        measurement = st.file_uploader(
            "measurement.json, log or trace",
            type=["json", "log", "txt", "out", "gz", "pickle", "pkl", "yaml", "yml"],
            key="measurement file",
            max_upload_size=_MAX_UPLOAD_MIB,
        )
    prediction = None
    if source == "file":
        with left:
            prediction = st.file_uploader(
                "prediction.json",
                type=["json"],
                key="prediction file",
                max_upload_size=_MAX_UPLOAD_MIB,
                help="A prediction of thousands of devices may be larger; choose the current scenario instead",
            )
    if measurement is None or (source == "file" and prediction is None):
        st.caption(
            "`simplan run SCENARIO -o FOLDER` writes both files. For a run without simplan, drop its log (Megatron-LM, "
            "Megatron Bridge, NeMo, torchtitan, DeepSpeed, Hugging Face Trainer), a trace of torch.profiler or a "
            "memory snapshot; or write `step_times_s: [2.41, 2.39, 2.44]` into a YAML file. Files are read as data "
            "and not stored. Prediction and measurement must be of the same job."
        )
    predicted = None if prediction is None else uploads.prediction_of(prediction.name, prediction.getvalue())
    if measurement is None:
        return
    content = measurement.getvalue()
    if source == "scenario":
        inputs = result_cache.worker_inputs(state.document())
        result = awaited("comparing", measured_result, *inputs, measurement.name, content)
        if isinstance(result, LoggedComparison):
            _show_logged(result)
        else:
            show_comparison(result)
    elif predicted is not None:
        measured = uploads.measured_of(measurement.name, content)
        if isinstance(measured, LoggedRun):
            show_logged(predicted, measured)
        else:
            show_comparison(result_of_files(predicted, measured))


def show_logged(prediction: dict[str, Any], logged: LoggedRun) -> None:
    """A log next to the prediction: the error, the changes and the terms that could explain it."""
    _show_logged(uploads.compared_logged(prediction, logged))


def _show_logged(comparison: LoggedComparison) -> None:
    median_of = f"Median of {counted(comparison.num_steps, 'steady step')}"
    if comparison.interval_holds is not None:
        show_metrics(_metrics(comparison, comparison.interval_s, median_of))
    show_figure(terms_figure(comparison.rows), "errors", alt="Errors next to the spread of the steps")
    tables = {**_show_hypotheses(comparison), **_show_memory(comparison), **_show_parts(comparison)}
    _show_downloads(comparison, **tables)


def _show_hypotheses(comparison: LoggedComparison) -> dict[str, list[dict[str, Any]]]:
    """Changes of the job that bring the prediction closer, if any were tried."""
    if comparison.hypotheses is None:
        return {}
    st.subheader("Possible explanations", help="The job predicted again with one change each")
    if not comparison.hypotheses:
        st.caption("No single change that was tried brings the prediction closer to the log.")
        return {}
    rows: list[dict[str, Any]] = [
        {"change": each.change, "step, ms": each.step_time_s * 1e3}
        | ({} if each.step_error is None else {"step error, %": 100 * each.step_error})
        | ({} if each.peak_error is None else {"peak, GiB": each.peak_gib, "peak error, %": 100 * each.peak_error})
        | {"explains it": "yes" if each.explains else ""}
        for each in comparison.hypotheses
    ]
    show_table(rows, digits=3)
    return {"Hypotheses": rows}


def _show_memory(comparison: LoggedComparison) -> dict[str, list[dict[str, Any]]]:
    """Categories of the predicted peak, if a logged peak is outside of its interval."""
    if not comparison.memory_terms:
        return {}
    st.subheader("Memory by category", help="Factor of one category alone that would explain the logged peak")
    single = any(term.factor is not None for term in comparison.memory_terms)
    rows = [
        {"category": term.category.replace("_", " "), "predicted, GiB": term.predicted_gib}
        | ({"factor alone": term.factor} if single else {})
        for term in comparison.memory_terms
    ]
    if not single:
        st.caption("No single category could be that much smaller.")
    show_table(rows, digits=3)
    return {"Memory": rows}


def _show_parts(comparison: LoggedComparison) -> dict[str, list[dict[str, Any]]]:
    """Most uncertain parts of the predicted step, if the log has times."""
    if not comparison.parts:
        return {}
    st.subheader("Largest uncertainty", help="Parts of the predicted critical path and their standard deviations")
    sentence = candidate_causes(comparison)
    st.caption(escaped(f"{sentence[0].upper()}{sentence[1:]}."))
    parts = [
        {
            "part": part.part,
            "predicted, ms": part.predicted_s * 1e3,
            "hidden, ms": part.hidden_s * 1e3,
            "std, ms": part.std_s * 1e3,
            "slowdown alone": part.times_as_long,
        }
        for part in comparison.parts
    ]
    show_table(parts, digits=3)
    return {"Parts": parts}


def show_comparison(result: MeasuredResult) -> None:
    """Prediction and measurement next to each other."""
    comparison = result.comparison
    median_of = f"Median of {result.num_steps} steps"
    actions = "as predicted" if comparison.structure_equal else "differ"
    show_metrics(
        [
            *_metrics(comparison, result.interval_s, median_of),
            ("Actions", actions, "Actions and collectives, and their order"),
            (
                "Unexplained",
                format_time(abs(comparison.unexplained_s)),
                "Part of the measured step without a known cause",
            ),
        ]
    )
    st.subheader("Errors by term", help="Gray: the spread of the repeats. Errors within the spread are not significant")
    show_figure(
        terms_figure(comparison.rows), "errors by term", alt="Errors of all terms next to the spread of the repeats"
    )
    st.subheader("Predicted and measured step", help="The measured step is the one with the median time")
    show_figure(
        steps_figure(result.predicted, result.measured),
        "predicted and measured step",
        alt="Both steps on one axis",
        zoom=True,
    )
    rows = [
        {"term": row.name, "predicted": row.predicted, "measured": row.measured, "unit": row.unit}
        | {"error": row.signed_error, "spread": row.spread, "within the spread": row.within_spread}
        for row in comparison.rows
    ]
    terms = [
        {
            "part": term.part,
            "counted as": str(term.share),
            "predicted, ms": term.predicted_s * 1e3,
            "measured, ms": term.measured_s * 1e3,
            "difference, ms": term.difference_s * 1e3,
        }
        for term in comparison.terms
    ]
    splits = [
        {"rank": split.rank, "share": str(share), "predicted, ms": split.predicted_s.get(share, 0.0) * 1e3}
        | {"measured, ms": split.measured_s.get(share, 0.0) * 1e3}
        for split in comparison.splits
        for share in dict.fromkeys((*split.predicted_s, *split.measured_s))
    ]
    with st.expander(f"All {len(rows)} terms"):
        show_table(rows)
    with st.expander("Critical path: terms that sum to the error"):
        show_table(terms, digits=3)
    with st.expander("Step breakdown per rank"):
        show_table(splits, digits=3)
    _show_downloads(comparison, Terms=rows, **{"Additive terms": terms, "Steps of ranks": splits})


def _metrics(
    found: Comparison | LoggedComparison, interval_s: Sequence[float], measured: str
) -> list[tuple[str, str, str]]:
    """Label, value and help of both step times and the error."""
    step = found.rows[0]
    low_s, high_s = (format_time(seconds) for seconds in interval_s)
    return [
        ("Predicted step", format_time(step.predicted), f"90 % interval {low_s} to {high_s}"),
        ("Measured step", format_time(step.measured), measured),
        ("Error", f"{step.signed_error or 0:+.1%}", "(predicted - measured) / measured"),
        ("Spread", "unknown" if step.spread is None else f"+/- {format_percent(step.spread)}", "Spread of the steps"),
        ("In the interval", "yes" if found.interval_holds else "no", "Measured step time inside the 90 % interval"),
    ]


def _show_downloads(found: Comparison | LoggedComparison, **tables: Sequence[dict[str, Any]]) -> None:
    """Notes of a comparison, and buttons that save its tables and its JSON document."""
    st.caption(escaped(" ".join(f"{note[0].upper()}{note[1:]}." for note in found.notes)))
    with st.container(horizontal=True):
        for name, rows in tables.items():
            download(name, name, "csv", csv_text(rows))
        download("Comparison", "comparison", "json", lambda: json_text(found.to_json()))
