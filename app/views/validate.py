"""Validate: predictions compared with published and local measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import streamlit as st

from app import result_cache, state, uploads
from app.components.elements import (
    csv_text,
    download,
    download_report,
    is_same_time,
    show_drawing,
    show_figure,
    show_metrics,
    show_table,
)
from app.components.paste import forget_log, read_log
from app.components.progress import ProgressBar, follow, show_progress, stage
from app.components.published import has_published, show_published
from app.components.scenario_form import show_scenario_form
from app.fields import remembered_choice
from app.figures.validation import MeasuredResult, measured_result, result_of_files, terms_figure
from app.fitting import Document, applied, document_text
from app.jobs.run import Run, may_run, runs
from app.page import Following, escaped, run_page
from app.result_cache import awaited
from simplan.cli.dashboard import is_local
from simplan.cluster.machine import THIS_MACHINE
from simplan.document import parse_yaml
from simplan.errors import SpecError
from simplan.io import json_text
from simplan.report.comparison import alone_words, candidate_causes, factor_words
from simplan.scenario import with_software
from simplan.units import counted, faster_or_slower, format_percent, format_time
from simplan.validate.compare import Comparison
from simplan.validate.hypotheses import Hypothesis
from simplan.validate.logged import LoggedComparison

_PARTS = {
    "published": "published runs",
    "measured": "uploaded measurement",
    "run": "run on this machine",
}
_SOURCES = {"scenario": "current scenario", "file": "uploaded file"}
_STAGES = ("start", "going")
_STEPS = (5, 10, 15, 30, 50)
_EXAMPLE = "1f1b"
"""Scenario of ``simplan demo`` for a run on this machine."""

Table = list[dict[str, Any]]


def show() -> Following | None:
    """Comparison of predictions with one of three kinds of measurements; published runs first, where there are any."""
    start = "published" if has_published() else "measured"
    part = remembered_choice("Measurements", "held", list(_PARTS), start, format_func=_PARTS.get)
    with stage(part, tuple(_PARTS)):
        if part == "published":
            return show_published()
        if part == "measured":
            _show_uploaded()
            return None
        show_scenario_form()
        return _show_run()


def _show_uploaded() -> None:
    """Comparison of an uploaded measurement with the current scenario's prediction, or with an uploaded one."""
    left, right = st.columns(2)
    limit = uploads.MAX_BYTES // 2**20
    with left:
        source = remembered_choice("Prediction", "prediction", list(_SOURCES), "scenario", format_func=_SOURCES.get)
    if source == "scenario":
        show_scenario_form()
    with right:
        label, types = (
            "measurement.json, log or trace",
            ["json", "log", "txt", "out", "gz", "pickle", "pkl", "yaml", "yml"],
        )
        measurement = st.file_uploader(label, type=types, key="measurement file", max_upload_size=limit)
    prediction = None
    if source == "file":
        with left:
            about = "A prediction of thousands of devices may be larger; choose the current scenario instead"
            prediction = st.file_uploader(
                "prediction.json", type=["json"], key="prediction file", max_upload_size=limit, help=about
            )
    log = read_log() if measurement is None else None
    if log is not None:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"Read on the page Plan: **{escaped(log[0].title)}**", width="content")
            st.button("Forget it", key="forget log", type="tertiary", on_click=forget_log)
    elif measurement is None or (source == "file" and prediction is None):
        st.caption(
            "`simplan run SCENARIO -o FOLDER` writes both files; `executor.record` measures a loop of your own. For a "
            "run without simplan, drop its log (Megatron-LM, Megatron Bridge, NeMo, torchtitan, DeepSpeed, Hugging "
            "Face Trainer), a trace of torch.profiler or a memory snapshot; or write `step_times_s: [2.41, 2.39]` into "
            "a YAML file. Files are read as data and not stored. Prediction and measurement must be of the same job. "
            f"`simplan compare` also reads files of more than {limit} MiB."
        )
    predicted = None if prediction is None else uploads.prediction_of(prediction.name, prediction.getvalue())
    if measurement is not None:
        name, content = measurement.name, measurement.getvalue()
    elif log is not None:
        name, content = log[0].file, log[1]
    else:
        return
    if source == "scenario":
        inputs = result_cache.worker_inputs(state.document())
        show_result(awaited("comparing", measured_result, *inputs, name, content), state.document())
    elif predicted is not None:
        show_result(result_of_files(predicted, uploads.measured_of(name, content)))


def _show_run() -> Following | None:
    last = runs().last
    if last is not None and last.is_going:
        with stage("going", _STAGES):
            return _watch(last)
    with stage("start", _STAGES):
        _show_start()
        if last is not None:
            _show_last(last)
    return None


def _show_start() -> None:
    try:
        scenario = result_cache.scenario(state.document())
    except SpecError:
        _show_example()
        raise
    if scenario.job.cluster.id != THIS_MACHINE:
        st.info(
            f"The scenario is for **{escaped(scenario.job.cluster.id)}**. To run the plan here, choose *this-machine* "
            "as nodes in the sidebar, and a small model; or take the example."
        )
        _show_example()
    elif not may_run():
        st.info(
            "Other machines reach this server, so pages may not start runs. Allow them with "
            "`simplan dashboard --allow-run`, or use `simplan run` on the command line."
        )
    else:
        ranks = scenario.job.cluster.num_devices
        st.caption(
            f"Calibrates this machine if needed, runs {ranks} process{'es' if ranks > 1 else ''} with "
            "torch.distributed, and compares the measurement with the prediction. Links never start a run."
        )
        steps = remembered_choice("Measured steps", "steps", _STEPS, 10)
        if st.button("Run here", type="primary", icon=":material/play_arrow:", key="start run"):
            runs().start(document_text(state.document()), scenario.name, steps)
            st.rerun()


def _show_example() -> None:
    """Button that replaces the scenario by one that this machine runs in a minute."""
    about = "A GPT of 8 layers in a pipeline of two ranks, one of the scenarios of `simplan demo`"
    label, icon = "Small example for this machine", ":material/computer:"
    st.button(label, icon=icon, key="small example", help=about, on_click=lambda: state.set_document(small_example()))


def small_example() -> Document:
    """Scenario that this machine runs in a minute."""
    file = resources.files("simplan").joinpath("data", "demo", f"{_EXAMPLE}.yaml")
    document: Document = parse_yaml(file.read_text(encoding="utf-8"), file.name).data
    return document


def _watch(run: Run) -> Following:
    def progress() -> ProgressBar:
        share, words = run.progress
        return ProgressBar(share, "stopping the ranks" if run.stopped else _without_folders(words))

    place = show_progress(progress(), run.stop)
    return partial(follow, place, lambda: progress() if run.is_going else None)


def _show_last(run: Run) -> None:
    st.subheader("Last run")
    if run.stopped:
        st.caption(f"Stopped after {run.steps_done} steps; files are in {_shown(str(run.folder))}.")
        return
    if run.failed:
        last = (run.stderr_tail.splitlines() or ["the run ended without output"])[-1]
        st.warning(_shown(last.removeprefix("error: ")))
        return
    names = ("prediction.json", "measurement.json")
    try:
        prediction, measurement = ((run.folder / name).read_bytes() for name in names)
    except OSError:
        st.caption(f"Files in {_shown(str(run.folder))} are missing.")
        return
    st.caption(f"Files are in {_shown(str(run.folder))}.")
    try:
        measured = uploads.measured_of(names[1], measurement)
        show_result(result_of_files(uploads.prediction_of(names[0], prediction), measured))
    except SpecError as error:
        st.warning(_shown(str(error)))


def _shown(text: str) -> str:
    """Text about a run as Markdown."""
    return escaped(_without_folders(text))


def _without_folders(text: str) -> str:
    """Text without folders of the server's user, where other machines reach the server."""
    if not is_local(st.get_option("server.address") or "localhost"):
        for folder in sorted({str(Path.cwd()), str(Path.home())} - {"/"}, key=len, reverse=True):
            text = text.replace(folder, "(server)")
    return text


def show_result(result: MeasuredResult | LoggedComparison, document: Document | None = None) -> None:
    """Prediction next to a measurement or to the values of a log.

    Args:
        result: The comparison.
        document: Scenario of the session, if the prediction is of it; None for another prediction.
    """
    if isinstance(result, LoggedComparison):
        _show_logged(result, document)
    else:
        _show_measured(result)


def _show_logged(comparison: LoggedComparison, document: Document | None) -> None:
    """The error, the changes and the terms that could explain it."""
    if other := comparison.other_framework:
        st.warning(escaped(f"{other[0].upper()}{other[1:]}."), icon=":material/help:")
        if document is not None:
            st.page_link("views/plan.py", label="Set the job first", icon=":material/content_paste:")
    if comparison.interval_holds is not None:
        _show_summary(comparison)
        median_of = f"Median of {counted(comparison.num_steps, 'steady step')}"
        show_metrics(_metrics(comparison, comparison.interval_s, median_of))
    show_figure(terms_figure(comparison.rows), "errors", alt="Errors next to the spread of the steps")
    tables: dict[str, Table] = {}
    if comparison.hypotheses is not None:
        _show_hypotheses(comparison.hypotheses, document)
        tables["Hypotheses"] = [
            {"change": hypothesis.change, "step, ms": hypothesis.step_time_s * 1e3}
            | ({} if hypothesis.step_error is None else {"step error, %": 100 * hypothesis.step_error})
            | (
                {}
                if hypothesis.peak_error is None
                else {"peak, GiB": hypothesis.peak_gib, "peak error, %": 100 * hypothesis.peak_error}
            )
            | {"explains it": "yes" if hypothesis.explains else ""}
            for hypothesis in comparison.hypotheses
        ]
    if comparison.memory_terms:
        about = "Factor of one category alone that would explain the logged peak"
        st.subheader("Memory by category", help=about)
        single = any(term.factor is not None for term in comparison.memory_terms)
        if not single:
            st.caption("No single category could be that much smaller.")
        tables["Memory"] = [
            {"category": term.category.replace("_", " "), "predicted, GiB": term.predicted_gib}
            | ({"factor alone": factor_words(term.factor)} if single else {})
            for term in comparison.memory_terms
        ]
        _show_rows(tables["Memory"])
    if comparison.parts:
        about = "Parts of the predicted critical path and their standard deviations"
        st.subheader("Largest uncertainty", help=about)
        sentence = candidate_causes(comparison)
        st.caption(escaped(f"{sentence[0].upper()}{sentence[1:]}."))
        tables["Parts"] = [
            {"part": part.part, "predicted, ms": part.predicted_s * 1e3, "hidden, ms": part.hidden_s * 1e3}
            | {"std, ms": part.std_s * 1e3, "slowdown alone": alone_words(part)}
            for part in comparison.parts
        ]
        _show_rows(tables["Parts"])
    _show_downloads(comparison, tables)


def _show_hypotheses(hypotheses: Sequence[Hypothesis], document: Document | None) -> None:
    """Changes of the job that could explain the log, likeliest first, with buttons that make them in the scenario."""
    st.subheader("Possible explanations", help="The job predicted again with one change each, the likeliest first")
    if not hypotheses:
        st.caption("No single change that was tried brings the prediction closer to the log.")
    for hypothesis in hypotheses:
        words, numbers, button = st.columns([5, 5, 1], vertical_alignment="center")
        words.markdown(escaped(hypothesis.change) + (" **explains it**" if hypothesis.explains else ""))
        numbers.markdown(_with_change(hypothesis))
        if document is not None and hypothesis.settings:
            then = with_settings(document, hypothesis.settings)
            button.button("Apply", key=f"explanation {hypothesis.change}", on_click=state.set_document, args=(then,))


def _with_change(hypothesis: Hypothesis) -> str:
    """The run beside the prediction with a change."""
    parts = []
    if hypothesis.step_error is not None:
        measured_s = hypothesis.step_time_s / (1 + hypothesis.step_error)
        parts.append(f"{format_time(hypothesis.step_time_s)} a step: {run_words(hypothesis.step_time_s, measured_s)}")
    if hypothesis.peak_gib is not None and hypothesis.peak_error is not None:
        parts.append(
            f"peak of {hypothesis.peak_gib:.2f} GiB, measured {hypothesis.peak_gib / (1 + hypothesis.peak_error):.2f}"
        )
    return "; ".join(parts)


def with_settings(document: Document, settings: Mapping[str, Any]) -> Document:
    """The scenario with new values by key, as ``Hypothesis.settings`` has them."""
    section = "software."
    options = {key.removeprefix(section): value for key, value in settings.items() if key.startswith(section)}
    others = {key: value for key, value in settings.items() if not key.startswith(section)}
    return with_software(applied(document, others), options)


def run_words(predicted_s: float, measured_s: float) -> str:
    """``your run is 12.6 % slower than predicted``."""
    if is_same_time(measured_s, predicted_s):
        return "your run is as predicted"
    return f"your run is {faster_or_slower(measured_s, predicted_s)} than predicted"


def _show_summary(comparison: Comparison | LoggedComparison) -> None:
    """The main result in one sentence."""
    step = comparison.rows[0]
    words = run_words(step.predicted, step.measured)
    sentence = f"**{words[:1].upper()}{words[1:]}**"
    tried = comparison.hypotheses if isinstance(comparison, LoggedComparison) else None
    if comparison.interval_holds:
        sentence += ", within the 90 % interval"
    elif tried and tried[0].explains:
        sentence += f"; this explains it: {escaped(tried[0].change)}"
    st.info(f"{sentence}.", icon=":material/straighten:")


def _show_measured(result: MeasuredResult) -> None:
    """Errors by term, both steps, and the terms that sum to the error."""
    comparison = result.comparison
    _show_summary(comparison)
    actions = "as predicted" if comparison.structure_equal else "differ"
    unexplained = format_time(abs(comparison.unexplained_s))
    show_metrics(
        [
            *_metrics(comparison, result.interval_s, f"Median of {result.num_steps} steps"),
            ("Actions", actions, "Actions and collectives, and their order"),
            ("Unexplained", unexplained, "Part of the measured step without a known cause"),
        ]
    )
    st.subheader("Errors by term", help="Gray: the spread of the repeats. Errors within the spread are not significant")
    alt = "Errors of all terms next to the spread of the repeats"
    show_figure(terms_figure(comparison.rows), "errors by term", alt=alt)
    st.subheader("Predicted and measured step", help="The measured step is the one with the median time")
    show_drawing("steps", result.svg, alt="Actions of every rank over the step, predicted and measured")
    rows = [
        {"term": row.name, "predicted": row.predicted, "measured": row.measured, "unit": row.unit}
        | {"error": row.signed_error, "spread": row.spread, "within the spread": row.within_spread}
        for row in comparison.rows
    ]
    terms = [
        {"part": term.part, "counted as": str(term.share), "predicted, ms": term.predicted_s * 1e3}
        | {"measured, ms": term.measured_s * 1e3, "difference, ms": term.difference_s * 1e3}
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
        _show_rows(terms)
    with st.expander("Step breakdown per rank"):
        _show_rows(splits)
    tables = {"Terms": rows, "Additive terms": terms, "Steps of ranks": splits}
    _show_downloads(comparison, tables, {"Steps": result.svg})


def _show_rows(rows: Table) -> None:
    if rows:
        show_table(rows, digits=3)


def _metrics(
    comparison: Comparison | LoggedComparison, interval_s: Sequence[float], measured: str
) -> list[tuple[str, str, str]]:
    """Label, value and help of both step times and the error."""
    step = comparison.rows[0]
    low_s, high_s = (format_time(seconds) for seconds in interval_s)
    about = f"Longer step / shorter step - 1. Error, (predicted - measured) / measured: {step.signed_error or 0:+.1%}"
    return [
        ("Predicted step", format_time(step.predicted), f"90 % interval {low_s} to {high_s}"),
        ("Measured step", format_time(step.measured), measured),
        ("Your run", faster_or_slower(step.measured, step.predicted), about),
        ("Spread", "unknown" if step.spread is None else f"+/- {format_percent(step.spread)}", "Spread of the steps"),
        (
            "In the interval",
            "yes" if comparison.interval_holds else "no",
            "Measured step time inside the 90 % interval",
        ),
    ]


def _show_downloads(
    comparison: Comparison | LoggedComparison, tables: Mapping[str, Table], drawings: Mapping[str, str] | None = None
) -> None:
    """Notes of a comparison, and buttons that save its tables, drawings and JSON document."""
    st.caption(escaped(" ".join(f"{note[0].upper()}{note[1:]}." for note in comparison.notes)))
    with st.container(horizontal=True):
        for name, rows in tables.items():
            if rows:
                download(name, name, "csv", csv_text(rows))
        for name, svg in (drawings or {}).items():
            download(name, name, "svg", svg)
        download("Comparison", "comparison", "json", lambda: json_text(comparison.to_json()))
        download_report("comparison", lambda: [json.loads(json_text(comparison.to_json()))])


if __name__ == "__main__":
    run_page(show)
