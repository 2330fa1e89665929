"""Processes that heed Ctrl-C however the tests were started."""

from __future__ import annotations

import signal

__all__ = ["heed_interrupts"]


def heed_interrupts() -> None:
    """For a child before it becomes another program: a shell has its background jobs ignore SIGINT, and so would it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
