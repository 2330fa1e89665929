"""Calls to a store that other nodes share, never for longer than a limit: a network may be cut at any time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["StoreLine"]

_Result = TypeVar("_Result")


class StoreLine:
    """One thread that makes the calls, one after the other; a daemon, so that a call that never returns is left."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="store", daemon=True).start()

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Starts a call."""
        future: Future[_Result] = Future()
        self._calls.put((future, call))
        return future

    def ask(self, call: Callable[[], _Result], timeout_s: float) -> _Result:
        """Makes a call and gives its result.

        Raises:
            TimeoutError: It has not returned in time.
        """
        return self.submit(call).result(timeout_s)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
