"""Waiting for child processes in a way that an interrupt can end at any moment."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

__all__ = ["Child", "ask_to_end", "exit_code"]

_SLICE_S = 0.05  # an interrupt waits no longer than this
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child(Protocol):
    """What is waited for (a subprocess.Popen, or something that stands for one)."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; subprocess.TimeoutExpired after ``timeout`` seconds."""

    def terminate(self) -> None:
        """Asks it to end."""


def exit_code(child: Child, within_s: float | None = None) -> int | None:
    """The exit code of a child once it has ended, or None when it still runs after a while.

    ``Popen.wait`` and ``poll`` take a lock of the child. A handler of a signal that raises just after that, as those of
    Ctrl-C do, leaves it locked: every later ``poll`` then says that the child runs, and ``wait`` never returns (about
    one in a hundred interrupts of a process that polls). Here handlers run between the looks at the child.

    Args:
        child: The process.
        within_s: How long to wait; 0 for a look, None for as long as it takes.
    """
    end_s = None if within_s is None else time.monotonic() + within_s
    while True:
        left_s = _SLICE_S if end_s is None else max(0.0, end_s - time.monotonic())
        with _signals_held(), contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(min(left_s, _SLICE_S))
        if end_s is not None and time.monotonic() >= end_s:
            return None


def ask_to_end(child: Child) -> None:
    """``child.terminate()``, which takes the same lock."""
    with _signals_held():
        child.terminate()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Handlers of signals run after the block instead of inside of it; only the main thread ever runs any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number_that_came, frame in came:
            handlers[signal.Signals(number_that_came)](number_that_came, frame)
