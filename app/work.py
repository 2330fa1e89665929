"""Work that takes longer than a moment: done in processes of its own, once for all sessions, and waited for."""

from __future__ import annotations

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from threading import Lock
from typing import Any, ParamSpec, TypeVar, cast

import streamlit as st

from simplan.errors import RunError, SpecError

__all__ = ["WORKERS", "awaited", "done"]

WORKERS = "SIMPLAN_WORKERS"
"""Environment variable with the number of processes; without it work is done where it is asked for."""

_MOST_KEPT = 48
_SILENT_S = 0.4  # shorter waits are not worth a word
_LOOK_S = 0.2

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Key = tuple[Any, ...]


def awaited(what: str, task: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """The result of a task, kept for everyone who asks the same.

    While it is awaited the page says so; whatever else the user asks meanwhile ends the wait.

    Args:
        what: What is being done, for people.
        task: A function of a module, without Streamlit.
        args, kwargs: Plain data.

    Raises:
        SpecError: The task raised it.
        RunError: The process ended, most likely for want of memory.
    """
    desk = _desk()
    future = desk.future(task, *args, **kwargs)
    place = st.empty()
    begun_s = time.monotonic()
    try:
        while not wait([future], timeout=_LOOK_S).done:
            passed_s = time.monotonic() - begun_s
            if passed_s > _SILENT_S:
                place.caption(f":material/hourglass_top: {what} ({passed_s:.0f} s)")  # Streamlit may end this run here
    finally:
        desk.leave(future)
    place.empty()
    return cast(_R, _result(desk, future))


def done(task: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """The same where there is no page to say so, e.g. when a file is asked for."""
    desk = _desk()
    future = desk.future(task, *args, **kwargs)
    try:
        wait([future])
    finally:
        desk.leave(future)
    return cast(_R, _result(desk, future))


def _result(desk: _Desk, future: Future[_Outcome]) -> Any:
    try:
        return future.result().value()
    except BrokenProcessPool:
        desk.restart()
        raise RunError(
            "the process that works this out ended, most likely for want of memory; ask something smaller"
        ) from None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a task returned or refused; errors do not survive the way between processes as they are."""

    result: Any = None
    refusal: tuple[type[SpecError], tuple[Any, ...], str | None] | None = None

    def value(self) -> Any:
        if self.refusal is None:
            return self.result
        kind, problems, file = self.refusal
        raise kind(problems, file=file)


def _guarded(task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
    try:
        return _Outcome(task(*args, **kwargs))
    except SpecError as error:
        return _Outcome(refusal=(type(error), error.problems, error.file))


class _Inline(Executor):
    """Does the work at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Desk:
    """Tasks by what they were asked, the latest last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._futures: OrderedDict[_Key, Future[_Outcome]] = OrderedDict()
        self._waiting: Counter[Future[_Outcome]] = Counter()
        self._executor = _executor()

    def future(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[_Outcome]:
        key = (task.__module__, task.__qualname__, args, tuple(sorted(kwargs.items())))
        with self._lock:
            future = self._futures.get(key)
            if future is None or future.cancelled() or (future.done() and future.exception() is not None):
                future = self._executor.submit(_guarded, task, args, kwargs)
                self._futures[key] = future
            self._futures.move_to_end(key)
            while len(self._futures) > _MOST_KEPT:
                self._futures.popitem(last=False)
            self._waiting[future] += 1
        return future

    def leave(self, future: Future[_Outcome]) -> None:
        """One waits no more; what nobody waits for is not begun."""
        with self._lock:
            self._waiting[future] -= 1
            if not self._waiting[future]:
                del self._waiting[future]
                future.cancel()

    def shut(self) -> None:
        """Ends the processes."""
        self._executor.shutdown(cancel_futures=True)

    def restart(self) -> None:
        with self._lock:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = _executor()
            self._futures.clear()


def _executor() -> Executor:
    number = int(os.environ.get(WORKERS, "0"))
    if not number:
        return _Inline()
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=_prepare)


def _prepare() -> None:
    """A worker is ready to predict before it is asked to, and gives way to the pages."""
    os.nice(5)
    import simplan.predict
    import simplan.sim.compiled  # noqa: F401


@st.cache_resource(show_spinner=False)
def _desk() -> _Desk:
    return _Desk()
