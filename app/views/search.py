"""Search: the best plans of the search space as they are found, with explanations, and the excluded plans."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import streamlit as st

from app import state
from app.budget import without_budget
from app.components.plans import show_plans, show_plans_so_far
from app.components.progress import ProgressBar, follow, show_progress, stage
from app.components.scenario_form import show_scenario_form
from app.components.verdict import show_budget
from app.fields import get, remembered_choice, remembered_number, remembered_switch
from app.figures.plans import SEARCHING, search_plans
from app.fitting import document_text
from app.jobs.job import JobState, StartedJob, TaskRequest, searches
from app.page import Following, escaped, run_page
from simplan import catalog
from simplan.report.search import GOALS, search_verdict
from simplan.scenario import SearchScenario, parse_search
from simplan.search import SearchResult, SearchSpace
from simplan.search.space import OBJECTIVES

_STAGES = ("start", "going", "found")
_TOP = 10
_DRAW_S, _EXPLAINED_S = 2.5, 1.0


def show() -> Following | None:
    """Search form in the sidebar; progress and plans next to it."""
    show_scenario_form(plan=False)
    with st.sidebar:
        section = _search_section()
    text = document_text(_document(section))
    search = parse_search(text, "scenario")
    key = ("search", text)
    if not searches().busy():
        searches().warm()  # a worker is ready when the button is pressed
    job = searches().find(key)
    if job is None or (job.state is JobState.ENDED and job.stopped and job.value is None and job.error is None):
        with stage("start", _STAGES):
            _show_start(search, key, text)
        return None
    if job.state is JobState.ENDED or _is_searched(job):
        with stage("found", _STAGES):
            return _show_found(search, job, key, text)
    with stage("going", _STAGES):
        return _show_running(job)


def _search_section() -> dict[str, Any]:
    """The section ``search`` of the scenario."""
    st.markdown("###### Search")
    first = remembered_choice("Objective", "by", OBJECTIVES, "step_time", format_func=GOALS.get)
    others = [goal for goal in OBJECTIVES if goal != first]
    default = "memory" if first != "memory" else "step_time"
    second = remembered_choice(
        "Second objective", f"against-{first}", others, default, format_func=GOALS.get, help="For the Pareto front"
    )
    section: dict[str, Any] = {"objectives": [first, second], "top": _TOP}
    default_share = 100 * SearchSpace().max_memory_fraction
    share = remembered_number(
        "Memory limit, %",
        "share",
        default_share,
        least=1.0,
        most=100.0,
        help="Maximum fraction of the device memory that a plan may use; the default keeps 5 % free",
    )
    if share != default_share:
        section["max_memory_fraction"] = share / 100
    deadline_s = remembered_number("Deadline, s", "deadline", 0.0, format="%g", help="Maximum step time; 0 for none")
    if deadline_s:
        section["max_step_time_s"] = deadline_s
    if _may_set("compiled") and remembered_switch("Compiled and eager", "compiled", help="Compare both in every plan"):
        section["compiled"] = [True, False]
    help_of_loss = "Compare a loss of all tokens and one in chunks in every plan"
    if _may_set("loss") and remembered_switch("Loss in chunks", "loss", help=help_of_loss):
        section["loss"] = ["whole", "chunked"]
    if "cost" in (first, second):
        section["token_budget"] = show_budget()
    return section


def _may_set(option: str) -> bool:
    """True if the framework of the scenario has an option."""
    chosen = get(("software",), "torch")
    name = chosen.get("preset", "torch") if isinstance(chosen, dict) else chosen
    return name in catalog.names("software") and option in catalog.software(name).options


def _document(section: dict[str, Any]) -> dict[str, Any]:
    document = {key: value for key, value in state.document().items() if key not in ("plan", "search", "expect")}
    return (document if "token_budget" in section else without_budget(document)) | {"search": section}


def _show_start(asked: SearchScenario, key: Any, text: str) -> None:
    st.info(
        f"**{escaped(asked.name)}**: every split of {asked.job.cluster.num_devices:,} devices into tensor, context, "
        "pipeline and data parallelism, every ZeRO stage, schedule, microbatch size and recomputation. Invalid plans "
        "and plans that exceed memory are counted by reason. The best plan is the best one by `simplan predict`."
    )
    icon = ":material/search:"
    st.button("Search", type="primary", icon=icon, key="search start", on_click=_start, args=(key, text))


def _start(key: Any, text: str) -> None:
    searches().start(key, TaskRequest(search_plans, (text,), reports_progress=True))


def _restart_button(label: str, key: Any, text: str) -> None:
    icon = ":material/refresh:"
    st.button(label, icon=icon, key="search again", on_click=_start, args=(key, text), width="stretch")


def _show_running(job: StartedJob) -> Following:
    """Progress, updated often, and plans, which a browser draws more slowly, updated less often."""
    known = job.value
    had_plans = isinstance(known, SearchResult)
    place = show_progress(_progress(job), job.stop)
    if had_plans:
        show_plans_so_far(known)
    drawn_s = time.monotonic()

    def look() -> ProgressBar | None:
        job.watch()
        if job.state is JobState.ENDED or _is_searched(job):
            return None
        if job.value is not known and (not had_plans or time.monotonic() - drawn_s > _DRAW_S):
            return None
        return _progress(job)

    return partial(follow, place, look)


def _is_searched(job: StartedJob) -> bool:
    """True when the ranking is final and only explanations are missing; reads ``value`` once, as the job continues."""
    known = job.value
    return isinstance(known, SearchResult) and not known.interrupted


def _num_explained(result: SearchResult) -> int:
    return sum(plan.explanation is not None for plan in (*result.ranked, *result.pareto))


def _progress(job: StartedJob) -> ProgressBar:
    update = job.update
    if job.state is JobState.WAITING:
        return ProgressBar(0.0, f"waiting for other searches on this server to end ({searches().waiting()} wait)")
    if job.state is JobState.STOPPING:
        return ProgressBar(1.0, "stopping")
    if update is None:
        return ProgressBar(0.0, "starting")
    if update.doing != SEARCHING:
        return ProgressBar(1.0, f"{update.total:,} plans evaluated; {update.doing}")
    share = update.done / max(1, update.total)
    return ProgressBar(share, f"{update.done:,} of {update.total:,} plans evaluated{_left(update.left_s)}")


def _left(seconds: float | None) -> str:
    """Upper estimate of the time left, in words; empty while it is unknown."""
    if seconds is None:
        return ""
    minutes = math.ceil(seconds / 60)
    most = "less than a minute" if minutes <= 1 else f"at most {minutes:,} min"
    return f", {most} left; usually less, since bounds prune most of the rest together"


def _show_found(asked: SearchScenario, job: StartedJob, key: Any, text: str) -> Following | None:
    """Result of a search; redrawn when more plans of the final ranking are explained."""
    job.watch()
    is_ended = job.state is JobState.ENDED
    if is_ended and job.error is not None:
        _restart_button("Search again", key, text)
        raise job.error
    result = job.value
    assert isinstance(result, SearchResult), "a search that ends well has a result"
    if job.reached:
        st.warning(f"Stopped: {escaped(job.reached)}.")
    can_continue = is_ended and result.interrupted
    line, again = st.columns([5, 1], vertical_alignment="center") if can_continue else (st.container(), st.empty())
    with line:
        after = f" (in {job.seconds:,.1f} s)" if is_ended else ""
        verdict = search_verdict(result)
        text_shown = f"**{escaped(verdict[:1].upper() + verdict[1:])}**{after}"
        (st.success if result.best is not None else st.error)(text_shown)
    if can_continue:
        with again:
            _restart_button("Continue search", key, text)
    known = _num_explained(result)

    def progress() -> ProgressBar:
        words = job.update.doing if job.update is not None else ""
        return ProgressBar(known / max(1, len(result.ranked) + len(result.pareto)), f"{words}; the ranking is final")

    place = st.empty() if is_ended else show_progress(progress())
    show_plans(asked, result)
    drawn_s = time.monotonic()

    def look() -> ProgressBar | None:
        job.watch()
        if job.state is JobState.ENDED:
            return None
        if _num_explained(job.value) != known and time.monotonic() - drawn_s > _EXPLAINED_S:
            return None
        return progress()

    return None if is_ended else partial(follow, place, look)


if __name__ == "__main__":
    run_page(show)
