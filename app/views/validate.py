"""Validate: predictions compared with published and local measurements."""

from __future__ import annotations

from functools import partial

import streamlit as st

from app import result_cache, state, uploads
from app.components.measured import show_comparison, show_uploaded
from app.components.progress import Following, ProgressBar, follow, show_progress, stage
from app.components.published import has_published, show_published
from app.components.scenario_form import show_scenario_form
from app.fields import remembered_choice
from app.jobs.run import Run, may_run, runs
from app.page import escaped, run_page
from app.results.measured import result_of_files
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import SpecError

_PARTS = {
    "published": "published runs",
    "measured": "uploaded measurement",
    "run": "run on this machine",
}
_STAGES = ("start", "going")
_STEPS = (5, 10, 15, 30, 50)


def show() -> Following | None:
    """Comparison of predictions with one of three kinds of measurements; published runs first, where there are any."""
    start = "published" if has_published() else "measured"
    part = remembered_choice("Measurements", "held", list(_PARTS), start, format_func=_PARTS.get)
    with stage(part, tuple(_PARTS)):
        if part == "published":
            return show_published()
        if part == "measured":
            show_uploaded()
            return None
        show_scenario_form()
        return _show_run()


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
    scenario = result_cache.scenario(state.document())
    if scenario.job.cluster.id != THIS_MACHINE:
        st.info(
            f"The scenario is for **{escaped(scenario.job.cluster.id)}**. To run the plan here, choose *this-machine* "
            "as nodes in the sidebar, and a small model."
        )
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
            runs().start(state.document_text(state.document()), scenario.name, steps)
            st.rerun()


def _watch(run: Run) -> Following:
    def progress() -> ProgressBar:
        share, words = run.progress
        return ProgressBar(share, "stopping the ranks" if run.stopped else words)

    place = show_progress(progress(), run.stop)
    return partial(follow, place, lambda: progress() if run.is_going else None)


def _show_last(run: Run) -> None:
    st.subheader("Last run")
    if run.stopped:
        st.caption(f"Stopped after {run.steps_done} steps; files are in {escaped(str(run.folder))}.")
        return
    if run.failed:
        last = (run.stderr_tail.splitlines() or ["the run ended without output"])[-1]
        st.warning(escaped(last.removeprefix("error: ")))
        return
    names = ("prediction.json", "measurement.json")
    try:
        prediction, measurement = ((run.folder / name).read_bytes() for name in names)
    except OSError:
        st.caption(f"Files in {escaped(str(run.folder))} are missing.")
        return
    st.caption(f"Files are in {escaped(str(run.folder))}.")
    try:
        measured = uploads.measurement_of(names[1], measurement)
        show_comparison(result_of_files(uploads.prediction_of(names[0], prediction), measured))
    except SpecError as error:
        st.warning(escaped(str(error)))


if __name__ == "__main__":
    run_page(show)
