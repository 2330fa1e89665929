"""Slow tasks of pages: run in separate processes, once for all sessions, and awaited."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import streamlit as st

from app.jobs.job import StartedJob, page_jobs
from app.jobs.messages import TaskRequest
from simplan.errors import SpecError

_SILENT_S = 0.4  # shorter waits are not worth a word
_LOOK_S = 0.05
_ANY = "simplan"

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
    with _asked(task, args, kwargs) as job:
        begun_s, said_s = time.monotonic(), 0
        while not job.ended.wait(_LOOK_S):
            give_way()
            passed_s = time.monotonic() - begun_s
            if passed_s > _SILENT_S and passed_s >= said_s:
                place.caption(f":material/hourglass_top: {what} ({passed_s:.0f} s)")
                said_s = int(passed_s) + 1
        if said_s:
            place.empty()
        return cast(_R, _result(job))


def done(task: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Result of a task, cached for all equal requests, without a note on a page."""
    with _asked(task, args, kwargs) as job:
        job.ended.wait()
        return cast(_R, _result(job))


def handed_over(task: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Result of a task for a download, which may be large and is not cached."""
    try:
        return done(task, *args, **kwargs)
    finally:
        page_jobs().forget(_key(task, args, kwargs))


def give_way() -> None:
    """Point where Streamlit can end a run of the page that was superseded, or whose browser has left."""
    st.session_state.get(_ANY)


def _result(job: StartedJob) -> Any:
    if job.error is not None:
        raise job.error
    return job.value


def _key(task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Cache key, equal for equal requests."""
    return (task.__module__, task.__qualname__, args, tuple(sorted(kwargs.items())))


@contextmanager
def _asked(task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[StartedJob]:
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
