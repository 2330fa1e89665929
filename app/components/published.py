"""Published runs: predicted next to measured step times, by source."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from app import uploads
from app.components.elements import csv_text, download, show_drawing, show_metrics
from app.components.progress import ProgressBar, follow, show_progress, stage
from app.fields import remembered_choice
from app.figures.validation import predict_published
from app.jobs.job import JobState, StartedJob, TaskRequest, searches
from app.page import Following, escaped
from simplan.accuracy.result import Accuracy
from simplan.accuracy.run import ReadFile
from simplan.documentation import documentation
from simplan.report.accuracy import run_rows
from simplan.report.drawings.accuracy_plot import accuracy_plot
from simplan.report.drawings.accuracy_svg import accuracy_svg
from simplan.units import format_number_evenly, format_percent

_SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
_FITTED, _HELD_OUT, _VALIDATION = "published", "heldout", "validation"
_STAGES = ("start", "going", "found")
_ALL, _ALL_HELD_OUT = "all sources", "all held-out sources"
_OWN = "uploaded file"
_FITTED_WORDS = (
    "In-sample errors: constants of the catalog were fitted on these sources. "
    f"{documentation('explanation/accuracy')} has cross-validated errors."
)
_HELD_OUT_WORDS = "Held-out errors: no constant of the catalog was fitted on these runs."
_VALIDATION_WORDS = (
    "Validation errors: no constant of the catalog was fitted on these runs, but the model of expert dispatch was "
    "tuned on them. Errors of new runs may be larger."
)
_COLUMNS: dict[str, Any] = {
    "id": "run",
    "predicted_step_time_s": st.column_config.NumberColumn("predicted step, s"),
    "measured_step_time_s": st.column_config.NumberColumn("measured step, s"),
    "step_time_error": st.column_config.NumberColumn("error", help="(predicted - measured) / measured"),
    "in_step_time_interval": "in the interval",
    "predicted_peak_memory_gib": st.column_config.NumberColumn("predicted peak, GiB"),
    "measured_peak_memory_gib": st.column_config.NumberColumn("measured peak, GiB"),
    "reason": "reason if skipped",
    "notes": "notes",
}

_FORMS = {
    "predicted_step_time_s": format_number_evenly,
    "measured_step_time_s": format_number_evenly,
    "step_time_error": "{:+.1%}",
    "predicted_peak_memory_gib": "{:.2f}",
    "measured_peak_memory_gib": "{:.2f}",
}


def has_published() -> bool:
    """True in a checkout of the repository; an installed package contains no published runs."""
    return bool(_sources(_FITTED))


def show_published() -> Following | None:
    """Select box for a source of runs, and the errors of its predictions."""
    names, held_out, validation = map(_sources, (_FITTED, _HELD_OUT, _VALIDATION))
    if not names:
        st.info(
            "An installed package does not contain the published runs. Upload a file of runs, e.g. from "
            f"scenarios/published of simplan's repository. Schema: {documentation('reference/published-runs')}"
        )
    choices = [*names, *([_ALL] if names else []), *held_out, *([_ALL_HELD_OUT] if held_out else []), *validation, _OWN]
    about = "In-sample, held-out and validation runs" if held_out else None
    chosen = remembered_choice("Source", "source", choices, choices[0], format_func=_source_words, help=about)
    several = {_ALL: names, _ALL_HELD_OUT: held_out}
    request = _uploaded() if chosen == _OWN else _known(several.get(chosen, [chosen]))
    if request is None:
        return None
    key, files = request
    num_runs = sum(len(file.runs or ()) for file in files)
    job = searches().find(key)
    if job is None or (job.state is JobState.ENDED and (job.stopped or job.error)):
        with stage("start", _STAGES):
            if job is not None and job.error is not None:
                raise job.error
            st.caption(f"{num_runs:,} published runs, predicted from their configurations.")
            st.button("Predict runs", type="primary", key="predict published", on_click=_start, args=(key, files))
    elif job.state is JobState.ENDED:
        with stage("found", _STAGES):
            words = {_OWN: "", _ALL_HELD_OUT: _HELD_OUT_WORDS}
            words |= dict.fromkeys(held_out, _HELD_OUT_WORDS) | dict.fromkeys(validation, _VALIDATION_WORDS)
            _show(Accuracy(tuple(job.value)), words.get(chosen, _FITTED_WORDS))
    else:
        with stage("going", _STAGES):
            return _watch(job)
    return None


@st.cache_resource(show_spinner=False)
def _sources(folder: str) -> list[str]:
    """Files of the repository with step times; held-out files are listed with their folder."""
    paths = sorted((_SCENARIOS / folder).glob("*.yaml"))
    before = "" if folder == _FITTED else f"{folder}/"
    return [before + file.stem for file in paths if "\nruns:" in file.read_text(encoding="utf-8")]


def _source_words(name: str) -> str:
    folder, _, file = name.rpartition("/")
    return f"{file} (held out)" if folder == _HELD_OUT else f"{file} (validation)" if folder else file


def _known(names: list[str]) -> tuple[Any, list[ReadFile]]:
    return ("accuracy", tuple(names)), [_read(name) for name in names]


@st.cache_resource(show_spinner=False, max_entries=32)
def _read(name: str) -> ReadFile:
    path = _SCENARIOS / f"{name if '/' in name else f'{_FITTED}/{name}'}.yaml"
    return uploads.published_of(path.name, path.read_bytes())


def _uploaded() -> tuple[Any, list[ReadFile]] | None:
    file = st.file_uploader("Published runs (YAML)", type=["yaml", "yml"], key="published file")
    if file is None:
        st.caption("Read as data, checked against the schema of published runs, and not stored.")
        return None
    content = file.getvalue()
    return ("accuracy", file.name, content), [uploads.published_of(file.name, content)]


def _start(key: Any, files: list[ReadFile]) -> None:
    searches().start(key, TaskRequest(predict_published, (files,), reports_progress=True))


def _watch(job: StartedJob) -> Following:
    def look() -> ProgressBar | None:
        job.watch()
        return None if job.state is JobState.ENDED else _progress(job)

    return partial(follow, show_progress(_progress(job), job.stop), look)


def _progress(job: StartedJob) -> ProgressBar:
    update = job.update
    if update is None:
        return ProgressBar(0.0, "starting")
    return ProgressBar(update.done / max(1, update.total), f"{update.done:,} of {update.total:,} predicted")


def _show(accuracy: Accuracy, about: str) -> None:
    overall = accuracy.overall
    errors = overall.step_time.errors
    show_metrics(
        [
            ("Runs", f"{overall.num_runs:,}", f"{overall.num_skipped:,} runs were skipped; the table has the reasons"),
            ("Mean error", _percent(errors.mape), "Mean absolute error of step times (MAPE)"),
            ("Median error", _percent(errors.median_ape), "Median absolute error of step times"),
            ("Largest error", _percent(errors.max_ape), "Largest absolute error of step times"),
            ("Bias", _percent(errors.bias), "Mean signed error; positive if predictions are too long"),
            ("Coverage", _percent(overall.step_time.interval_coverage), "Measured steps inside the 90 % interval"),
            ("Memory error", _percent(overall.peak_memory["all"].errors.mape), "Mean absolute error of peak memory"),
        ]
    )
    plot = accuracy_plot(accuracy)
    if plot is None:
        st.info("No step time was both measured and predicted.")
    else:
        svg = accuracy_svg(plot)
        show_drawing("accuracy", svg, alt="Predicted over measured step times of the runs")
        if about:
            st.caption(about)
        download("Plot", "predicted and measured", "svg", svg)
    rows = run_rows(accuracy)
    frame = pd.DataFrame(rows)
    frame = frame.sort_values("step_time_error", key=lambda errors: -errors.astype(float).abs(), na_position="last")
    shown = ["id", "predicted_step_time_s", "measured_step_time_s", "step_time_error", "in_step_time_interval"]
    shown += ["predicted_peak_memory_gib", "measured_peak_memory_gib", "reason", "notes"]
    st.subheader("Runs by error")
    styled = frame[shown].style.format(_FORMS, na_rep="")
    st.dataframe(styled, hide_index=True, height=320, placeholder="", column_config=_COLUMNS)
    download("Runs", "published runs", "csv", csv_text(rows))
    skipped = [outcome for outcome in accuracy.outcomes if outcome.predicted is None]
    if skipped:
        st.caption(escaped(f"Skipped, for example: {skipped[0].run.id}: {skipped[0].reason}"))


def _percent(value: float | None) -> str:
    return "none" if value is None else format_percent(value)
