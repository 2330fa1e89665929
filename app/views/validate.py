"""Validate: predictions compared with published and local measurements."""

from __future__ import annotations

from functools import partial

import streamlit as st

from app import answers, state, uploads
from app.components.measured import show_comparison_of, show_uploaded
from app.components.problems import escaped
from app.components.progress import Following, ProgressBar, follow, show_progress, stage
from app.components.published import show_published
from app.components.question import show_question
from app.fields import remembered_choice
from app.jobs.run import Run, may_run
from app.jobs.server import runs
from app.page import run_page
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import SpecError

_PARTS = {
    "published": "runs that others published",
    "measured": "a measurement of your own",
    "run": "a run on this machine",
}
_STAGES = ("start", "going")
_STEPS = (5, 10, 15, 30, 50)


def show() -> Following | None:
    """Comparison of predictions with one of three kinds of measurements."""
    part = remembered_choice("Hold predictions against", "held", list(_PARTS), "published", format_func=_PARTS.get)
    with stage(part, tuple(_PARTS)):
        if part == "published":
            return show_published()
        if part == "measured":
            show_uploaded()
            return None
        show_question()
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
    asked = answers.scenario(state.document())
    if asked.job.cluster.id != THIS_MACHINE:
        st.info(
            f"The scenario is for **{escaped(asked.job.cluster.id)}**. Choose the nodes *this-machine* in the sidebar, "
            "and a model that is small enough for it, to run the plan here."
        )
    elif not may_run():
        st.info(
            "Others than this machine reach this server, so pages start nothing on it. "
            "`simplan dashboard --allow-run` lets them; `simplan run` on the command line does the same as this page."
        )
    else:
        ranks = asked.job.cluster.num_devices
        st.caption(
            f"Starts {ranks} process{'es' if ranks > 1 else ''} with torch.distributed, calibrates first what is not "
            "calibrated, and lines measured and predicted up. Only this button starts a run; no link does."
        )
        steps = remembered_choice("Steps to measure", "steps", _STEPS, 10)
        if st.button("Run it here", type="primary", icon=":material/play_arrow:", key="start run"):
            runs().start(answers.text(state.document()), asked.name, steps)
            st.rerun()


def _watch(run: Run) -> Following:
    def progress() -> ProgressBar:
        done = run.steps_done
        words = f"step {done}" if done else (run.said.splitlines() or ["starting"])[-1]
        return ProgressBar(done / (run.num_steps + 2), "stopping the ranks" if run.stopped else words)

    place = show_progress(progress(), run.stop)
    return partial(follow, place, lambda: progress() if run.is_going else None)


def _show_last(run: Run) -> None:
    st.subheader("The last run")
    if run.stopped:
        st.caption(f"It was stopped after {run.steps_done} steps; what was measured is in {escaped(str(run.folder))}.")
        return
    if run.failed:
        last = (run.said.splitlines() or ["it ended without a word"])[-1]
        st.warning(escaped(last.removeprefix("error: ")))
        return
    files = [run.folder / f"{name}.json" for name in ("prediction", "measurement")]
    try:
        prediction, measurement = (file.read_bytes() for file in files)
    except OSError:
        st.caption(f"Its files in {escaped(str(run.folder))} are gone.")
        return
    st.caption(f"Its files are in {escaped(str(run.folder))}.")
    try:
        show_comparison_of(
            uploads.prediction_of("prediction.json", prediction),
            uploads.measurement_of("measurement.json", measurement),
        )
    except SpecError as error:
        st.warning(escaped(str(error)))


if __name__ == "__main__":
    run_page(show)
