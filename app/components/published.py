"""Published runs: predicted next to measured step times, by source."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from app import uploads
from app.components.downloads import csv_text, download, show_figure
from app.components.problems import escaped
from app.components.progress import Following, ProgressBar, follow, show_progress, stage
from app.fields import remembered_choice
from app.figures.validation import errors_figure, runs_figure
from app.jobs.job import BackgroundJob, State
from app.jobs.messages import Question
from app.jobs.server import searches
from app.jobs.tasks import predict_published
from simplan.accuracy.reading import ReadFile
from simplan.accuracy.result import Accuracy
from simplan.documentation import documentation
from simplan.report.accuracy import run_rows
from simplan.units import format_number_evenly, format_percent

__all__ = ["show_published"]

_SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
_FITTED, _HELD_OUT, _LOOKED_AT = "published", "heldout", "validation"
_STAGES = ("start", "going", "found")
_ALL, _ALL_HELD_OUT = "all sources", "all runs that no fit has seen"
_OWN = "a file of your own"
_FITTED_WORDS = (
    "Constants of the catalogue were fitted on runs of these very sources, so these errors are in-sample: "
    f"{documentation('explanation/accuracy')} has the five-fold figures, which count for a framework that is "
    "calibrated, and those with the whole source left out."
)
_HELD_OUT_WORDS = "No constant of the catalogue was fitted on these runs: so far off predictions of new ones may be."
_LOOKED_AT_WORDS = (
    "No constant of the catalogue was fitted on these runs, but they were in sight when it was modelled how tokens "
    "come to experts: predictions of new ones may be further off."
)
_COLUMNS: dict[str, Any] = {
    "id": "run",
    "predicted_step_time_s": st.column_config.NumberColumn("predicted step, s"),
    "measured_step_time_s": st.column_config.NumberColumn("measured step, s"),
    "step_time_error": st.column_config.NumberColumn("error", help="Predicted over measured, less one"),
    "in_step_time_interval": "in its interval",
    "predicted_peak_memory_gib": st.column_config.NumberColumn("predicted peak, GiB"),
    "measured_peak_memory_gib": st.column_config.NumberColumn("measured peak, GiB"),
    "reason": "why not predicted",
    "notes": "notes",
}

_FORMS = {
    "predicted_step_time_s": format_number_evenly,
    "measured_step_time_s": format_number_evenly,
    "step_time_error": "{:+.1%}",
    "predicted_peak_memory_gib": "{:.2f}",
    "measured_peak_memory_gib": "{:.2f}",
}


def show_published() -> Following | None:
    """Lets the user choose a source, predicts its runs, and shows the errors."""
    names, held_out, looked_at = (_sources(folder) for folder in (_FITTED, _HELD_OUT, _LOOKED_AT))
    if not names:
        st.info(
            "The published runs are not part of an installed package. Drop a file of runs here, e.g. one of "
            "scenarios/published of simplan's repository; its form is described at "
            f"{documentation('reference/published-runs')}"
        )
    choices = [*names, *([_ALL] if names else []), *held_out, *([_ALL_HELD_OUT] if held_out else []), *looked_at, _OWN]
    about = "Also runs that were kept apart from every fit" if held_out else None
    chosen = remembered_choice("Source", "source", choices, choices[0], format_func=_source_words, help=about)
    question: tuple[Any, list[ReadFile]] | None
    several = {_ALL: names, _ALL_HELD_OUT: held_out}
    question = _own() if chosen == _OWN else _known(several.get(chosen, [chosen]))
    if question is None:
        return None
    key, files = question
    num_runs = sum(len(file.runs or ()) for file in files)
    job = searches().find(key)
    if job is None or (job.state is State.ENDED and (job.stopped or job.error)):
        with stage("start", _STAGES):
            if job is not None and job.error is not None:
                raise job.error
            st.caption(f"{num_runs:,} runs that others measured, predicted from their configurations alone.")
            st.button("Predict them", type="primary", key="predict published", on_click=_start, args=(key, files))
    elif job.state is State.ENDED:
        with stage("found", _STAGES):
            words = {_OWN: "", _ALL_HELD_OUT: _HELD_OUT_WORDS}
            words |= dict.fromkeys(held_out, _HELD_OUT_WORDS) | dict.fromkeys(looked_at, _LOOKED_AT_WORDS)
            _show(Accuracy(tuple(job.value)), words.get(chosen, _FITTED_WORDS))
    else:
        with stage("going", _STAGES):
            return _watch(job)
    return None


@st.cache_resource(show_spinner=False)
def _sources(folder: str) -> list[str]:
    """Files of the repository with step times; held-out files are listed with their folder."""
    found = sorted((_SCENARIOS / folder).glob("*.yaml"))
    before = "" if folder == _FITTED else f"{folder}/"
    return [before + file.stem for file in found if "\nruns:" in file.read_text(encoding="utf-8")]


def _source_words(name: str) -> str:
    folder, _, file = name.rpartition("/")
    return f"{file} (no fit has seen it)" if folder == _HELD_OUT else f"{file} (looked at)" if folder else file


def _known(names: list[str]) -> tuple[Any, list[ReadFile]]:
    return ("accuracy", tuple(names)), [_read(name) for name in names]


@st.cache_resource(show_spinner=False, max_entries=32)
def _read(name: str) -> ReadFile:
    path = _SCENARIOS / f"{name if '/' in name else f'{_FITTED}/{name}'}.yaml"
    return uploads.published_of(path.name, path.read_bytes())


def _own() -> tuple[Any, list[ReadFile]] | None:
    file = st.file_uploader("Published runs (YAML)", type=["yaml", "yml"], key="published file")
    if file is None:
        st.caption("Read as data, checked against the schema of scenarios/published, and not stored.")
        return None
    content = file.getvalue()
    return ("accuracy", file.name, content), [uploads.published_of(file.name, content)]


def _start(key: Any, files: list[ReadFile]) -> None:
    searches().start(key, Question(predict_published, (files,), tells=True))


def _watch(job: BackgroundJob) -> Following:
    def look() -> ProgressBar | None:
        job.watch()
        return None if job.state is State.ENDED else _progress(job)

    return partial(follow, show_progress(_progress(job), job.stop), look)


def _progress(job: BackgroundJob) -> ProgressBar:
    update = job.update
    if update is None:
        return ProgressBar(0.0, "starting")
    return ProgressBar(update.done / max(1, update.total), f"{update.done:,} of {update.total:,} predicted")


def _show(accuracy: Accuracy, about: str) -> None:
    overall = accuracy.overall
    errors = overall.step_time.errors
    cells = [
        ("Runs", f"{overall.num_runs:,}", f"{overall.num_skipped:,} of them were not predicted, the table says why"),
        ("Mean error", _percent(errors.mape), "Mean of the absolute errors of step times (MAPE)"),
        ("Median", _percent(errors.median_ape), "Median of the same"),
        ("Worst", _percent(errors.max_ape), "Largest of the same"),
        ("Bias", _percent(errors.bias), "Mean with signs: above 0 where predictions are too long"),
        ("In the interval", _percent(overall.step_time.interval_coverage), "Share of measured steps; 90 % is the aim"),
        ("Memory", _percent(overall.peak_memory["all"].mape), "Mean absolute error of peak memory"),
    ]
    for column, (label, value, meaning) in zip(st.columns(len(cells)), cells, strict=True):
        column.metric(label, value, help=meaning)
    left, right = st.columns(2, gap="medium")
    with left:
        show_figure(runs_figure(accuracy.outcomes), "predicted and measured", alt="Predicted over measured step times")
        st.caption(f"A cross is a run outside of its predicted interval. {about}")
    with right:
        show_figure(errors_figure(accuracy.outcomes), "errors by source", alt="Errors of step times by source")
    rows = run_rows(accuracy)
    frame = pd.DataFrame(rows)
    frame["worst first"] = frame["step_time_error"].astype(float).abs()
    frame = frame.sort_values("worst first", ascending=False, na_position="last")
    shown = ["id", "predicted_step_time_s", "measured_step_time_s", "step_time_error", "in_step_time_interval"]
    shown += ["predicted_peak_memory_gib", "measured_peak_memory_gib", "reason", "notes"]
    st.subheader("Runs, the worst first")
    styled = frame[shown].style.format(_FORMS, na_rep="")
    st.dataframe(styled, hide_index=True, height=320, placeholder="", column_config=_COLUMNS)
    download("Runs", "published runs", "csv", csv_text(rows))
    skipped = [outcome for outcome in accuracy.outcomes if outcome.predicted is None]
    if skipped:
        st.caption(escaped(f"Not predicted, for example: {skipped[0].run.id}: {skipped[0].reason}"))


def _percent(value: float | None) -> str:
    return "none" if value is None else format_percent(value)
