"""Results for pages, cached for all sessions of the server; slow ones come from worker processes, and are awaited.

Functions of a scenario take it as plain data, and raise a SpecError if it is wrong, or if it has no cost estimate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import streamlit as st

from app.budget import without_budget
from app.fitting import document_text
from app.jobs.job import StartedJob, TaskRequest, page_jobs
from app.predictions import Headline, quick_headline
from simplan.cost.calibration.store import default_path
from simplan.errors import Problem, SpecError
from simplan.scenario import Scenario, parse_scenario

Document = dict[str, Any]

MAX_DEVICES = 131_072
"""Maximum number of devices of a plan that pages predict: each rank takes time and memory of the server."""

_MAX_QUICK_DEVICES = 8_192
_SILENT_S = 0.4  # shorter waits are not worth a word
_LOOK_S = 0.05

_P = ParamSpec("_P")
_R = TypeVar("_R")


def scenario(document: Document) -> Scenario:
    """The checked scenario."""
    return _scenario(_key_of(document))


def headline(document: Document) -> Headline | None:
    """Key numbers as a search computes them; None for ranks that share CPU cores, and for large clusters."""
    return _headline(_key_of(without_budget(document)))


def worker_inputs(document: Document) -> tuple[str, int]:
    """Arguments of tasks in worker processes: text of the scenario, and modification time of the calibration in use.

    The text has no sections of a whole run, on which no step depends. The time is a cache key; it is 0 without a
    calibration.
    """
    path = default_path()
    calibrated = scenario(document).job.cluster.cores_per_node is not None and path.exists()
    return document_text(without_budget(document)), path.stat().st_mtime_ns if calibrated else 0


def _key_of(document: Document) -> str:
    """Cache key, equal for equal documents; includes the name, which results show."""
    return json.dumps(document, default=str)


@st.cache_resource(max_entries=256, show_spinner=False)
def _scenario(key: str) -> Scenario:
    scenario = parse_scenario(document_text(json.loads(key)))
    devices = scenario.job.cluster.num_devices
    if devices > MAX_DEVICES:
        rule, fix = f"is more than the pages predict, {MAX_DEVICES:,}", "use `simplan predict FILE` for larger clusters"
        raise SpecError(Problem(field="cluster.num_devices", value=f"{devices:,}", rule=rule, fix=fix))
    return scenario


@st.cache_resource(max_entries=256, show_spinner=False)
def _headline(key: str) -> Headline | None:
    scenario = _scenario(key)
    return quick_headline(scenario) if scenario.job.cluster.num_devices <= _MAX_QUICK_DEVICES else None


def awaited(what: str, task: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Result of a task, cached for all equal requests.

    The page shows a note during the wait; any action of the user ends the wait.

    Args:
        what: Description of the task, to show.
        task: Module-level function without Streamlit.
        args, kwargs: Plain data.

    Raises:
        SpecError: The task raised it.
        RunError: The process ended, most likely because memory ran out.
    """
    place = st.empty()
    with _started(task, args, kwargs) as job:
        begun_s, said_s = time.monotonic(), 0
        while not job.ended.wait(_LOOK_S):
            give_way()
            passed_s = time.monotonic() - begun_s
            if passed_s > _SILENT_S and passed_s >= said_s:
                place.caption(f":material/hourglass_top: {what} ({passed_s:.0f} s)")
                said_s = int(passed_s) + 1
        if said_s:
            place.empty()
        return cast(_R, job.result())


@contextmanager
def begun(task: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Iterator[None]:
    """Context in which a task already runs; ``awaited`` then waits for the rest of it."""
    with _started(task, args, kwargs):
        yield


def done(task: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Result of a task, cached for all equal requests, without a note on a page."""
    with _started(task, args, kwargs) as job:
        job.ended.wait()
        return cast(_R, job.result())


def handed_over(task: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Result of a task for a download, which may be large and is not cached."""
    try:
        return done(task, *args, **kwargs)
    finally:
        page_jobs().forget(_key(task, args, kwargs))


def give_way() -> None:
    """Point where Streamlit can end a run of the page that was superseded, or whose browser has left."""
    st.session_state.get("simplan")


def _key(task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Cache key, equal for equal requests."""
    return (task.__module__, task.__qualname__, args, tuple(sorted(kwargs.items())))


@contextmanager
def _started(task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[StartedJob]:
    """Context with a job that the caller waits for."""
    key = _key(task, args, kwargs)
    request = TaskRequest(task, args, kwargs)
    while True:
        job = page_jobs().find(key)
        if job is None or not isinstance(job.error, SpecError):  # a rejected request is rejected again
            job = page_jobs().start(key, request)
        if job.join():
            break
    try:
        yield job
    finally:
        job.leave()
