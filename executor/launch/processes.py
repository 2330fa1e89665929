"""What Linux does about processes: ends them with their parent, and kills them for want of memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = ["PARENT_VARIABLE", "die_with_parent", "num_kernel_kills"]

PARENT_VARIABLE = "SIMPLAN_PARENT"
"""Environment variable in which a process tells its children its id."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process a signal when its parent ends, however that happens; elsewhere does nothing.

    A parent that has told its id in ``PARENT_VARIABLE`` may have ended before this call: then the signal comes now.
    """
    if sys.platform != "linux":
        return
    parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), number)


def num_kernel_kills() -> int:
    """How many processes Linux has killed on this host for want of memory since it started; elsewhere 0."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
