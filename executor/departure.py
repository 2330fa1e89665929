"""A node that is told to leave (SIGTERM: a spot instance that is taken back, a pod that is evicted, ``scancel``).

In a run that goes on with fewer nodes it does not end at once: its ranks, and with them all others, stop at a
checkpoint of the step that they are in, when that does not take too long. Then it tells the others that it leaves, and
they go on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from simplan.errors import RunError

__all__ = ["Departure", "LeftError", "told_to_leave"]

_STOP_S = 15.0  # for ranks to stop; Kubernetes and Slurm kill after 30 s, the command line after 25


class LeftError(RunError):
    """This node has left the run, as it was told to."""

    exit_code = 128 + signal.SIGTERM


class Departure:
    """Whether, and since when, this node is to leave."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def begin(self) -> None:
        """It is told; again, when nothing changes."""
        if self._told_s is None:
            self._told_s = time.monotonic()

    @property
    def is_told(self) -> bool:
        """Whether it is to leave."""
        return self._told_s is not None

    @property
    def is_due(self) -> bool:
        """Whether its ranks have had the time to stop."""
        return self._told_s is not None and time.monotonic() - self._told_s > _STOP_S


@contextmanager
def told_to_leave(*, heeds: bool) -> Iterator[Departure]:
    """What SIGTERM says to this node, inside of the block.

    Args:
        heeds: Whether it leaves in order; without that, and outside of the main thread, SIGTERM does what it did.
    """
    departure = Departure()
    if not heeds or threading.current_thread() is not threading.main_thread():
        yield departure
        return

    def told(number: int, frame: FrameType | None) -> None:
        departure.begin()

    previous = signal.signal(signal.SIGTERM, told)
    try:
        yield departure
    finally:
        signal.signal(signal.SIGTERM, previous)
