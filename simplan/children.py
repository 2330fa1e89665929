"""Interruptible wait for child processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

_SLICE_S = 0.05  # an interrupt waits no longer than this
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child(Protocol):
    """A child process: ``subprocess.Popen``, or an object with the same methods."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""

    def terminate(self) -> None:
        """Ask the process to exit."""


def exit_code(child: Child, within_s: float | None = None) -> int | None:
    """Wait for a child; return its exit code, or None if it still runs after ``within_s``.

    ``Popen.wait`` and ``poll`` take a lock of the child. A signal handler that raises just after that, like those for
    Ctrl-C, leaves the lock held. Then every later ``poll`` reports a running child, and ``wait`` never returns (about
    1% of interrupts of a polling process). Here signal handlers run only between checks of the child.

    Args:
        within_s: Seconds to wait; 0 checks once, None waits without limit.
    """
    end_s = None if within_s is None else time.monotonic() + within_s
    while True:
        left_s = _SLICE_S if end_s is None else max(0.0, end_s - time.monotonic())
        with _signals_held(), contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(min(left_s, _SLICE_S))
        if end_s is not None and time.monotonic() >= end_s:
            return None


def terminate_child(child: Child) -> None:
    """Call ``child.terminate()``, which takes the same lock, with signals deferred."""
    with _signals_held():
        child.terminate()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Defer signal handlers until after the block; only the main thread runs them."""
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
