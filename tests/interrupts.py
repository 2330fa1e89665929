"""Processes that heed Ctrl-C however the tests were started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def heed_interrupts() -> None:
    """For a child before it becomes another program: a shell has its background jobs ignore SIGINT, and so would it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def heeded_interrupts() -> Iterator[None]:
    """The same for this process, meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
