"""How the launcher sees what every rank is doing: one small file per rank, mapped into memory on both sides.

A rank writes its record before and after every action, which costs about a microsecond and survives its death; the
launcher reads all records a few times per second.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

__all__ = ["Beat", "Heartbeat", "RankState", "Unwatched", "read_beat"]

_RECORD = struct.Struct("<qqdqq64s")  # pid, attempt, time of the beat, step, state, what it does


class RankState(IntEnum):
    """What a rank is doing; ``STOPPED``: it has ended in order before the training was done (``executor.stopping``)."""

    STARTING = 0
    RUNNING = 1
    WAITING = 2
    FINISHED = 3
    FAILED = 4
    STOPPED = 5


class Beat(NamedTuple):
    """The last sign of life of a rank.

    Attributes:
        pid: Its process.
        time_s: When it wrote this, on ``time.monotonic``'s clock (common to all processes of a machine).
        step: Steps it has finished.
        state: What it is doing.
        doing: The action it runs or waits to start, or a phrase (``building the model``).
        attempt: How often the ranks had been started before.
    """

    pid: int
    time_s: float
    step: int
    state: RankState
    doing: str
    attempt: int = 0


class Heartbeat:
    """A rank's side of its record.

    Args:
        path: The file, made anew.
        attempt: How often the ranks have been started before.
    """

    def __init__(self, path: Path, attempt: int = 0) -> None:
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._pid = os.getpid()
        self._attempt = attempt
        self._step = 0
        self.beat(RankState.STARTING, "starting")

    def beat(self, state: RankState, doing: str, step: int | None = None) -> None:
        """Writes the record; ``step`` stays as it was when not given."""
        if step is not None:
            self._step = step
        # one copy: pack_into would clear the record first, and the launcher reads at any time
        self._memory[:] = _RECORD.pack(
            self._pid, self._attempt, time.monotonic(), self._step, state, doing.encode()[:64]
        )


class Unwatched(Heartbeat):
    """Of a rank that no launcher watches."""

    def __init__(self) -> None: ...

    def beat(self, state: RankState, doing: str, step: int | None = None) -> None:
        """Nobody looks."""


def read_beat(path: Path) -> Beat | None:
    """The record as it stands; None when the rank has not written one yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _RECORD.size:
        return None
    pid, attempt, time_s, step, state, doing = _RECORD.unpack(data)
    if pid == 0:
        return None
    return Beat(pid, time_s, step, RankState(state), doing.rstrip(b"\0").decode(errors="replace"), attempt)
