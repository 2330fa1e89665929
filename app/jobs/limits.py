"""Limits of a job of a page, so that one page cannot take a whole server: time, memory, and time without a reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from simplan.cluster.machine import machine_memory_bytes
from simplan.units import format_bytes

_MACHINE_FRACTION, _LEAST_BYTES = 0.25, 2 * 2**30
_PROC, _CGROUP_LIMIT = Path("/proc"), Path("/sys/fs/cgroup/memory.max")
_SMALLER = (
    "A smaller job has fewer devices (cluster.num_devices), fewer microbatches per step or no cluster.topology; "
    "the command line has no such limit"
)


class Usage(NamedTuple):
    """Use of a job so far.

    Attributes:
        running_s: Seconds since a worker took it.
        unread_s: Seconds since a page last waited for it; 0 while one waits.
        num_bytes: Function that returns the resident memory of its worker in bytes, 0 if unknown.
    """

    running_s: float
    unread_s: float
    num_bytes: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every job of a pool.

    Attributes:
        running_s: Maximum seconds in a worker.
        num_bytes: Maximum resident memory of its worker, in bytes; measured on Linux.
        unread_s: Maximum seconds without a page that waits for the job, or watches it.
    """

    running_s: float
    num_bytes: int
    unread_s: float

    def reached(self, usage: Usage) -> str | None:
        """Sentence on the limit that a job has reached; empty if no page waits for the job, None below all limits."""
        if usage.unread_s > self.unread_s:
            return ""
        if usage.running_s > self.running_s:
            return f"the job took longer than {self.running_s / 60:g} min, the limit for jobs of pages. {_SMALLER}"
        if usage.num_bytes() > self.num_bytes:
            limit = format_bytes(self.num_bytes)
            return f"the job needed more than {limit} of this server's memory, the limit for jobs of pages. {_SMALLER}"
        return None


def memory_limit_bytes() -> int:
    """Memory that one job may use: a quarter of the machine's, or of the container's, and 2 GiB at least."""
    try:
        allowed = int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # another system, or "max"
        allowed = machine_memory_bytes()
    return max(_LEAST_BYTES, int(_MACHINE_FRACTION * min(allowed, machine_memory_bytes())))


def process_bytes(pid: int) -> int:
    """Resident memory of a process without shared pages, in bytes; 0 where the system does not tell it."""
    try:
        _, resident, shared, *_ = map(int, (_PROC / str(pid) / "statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
