"""Processes that end with their parent, and groups of them that can be ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable

__all__ = ["die_with_parent", "kill_sessions"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, however that happens; elsewhere does nothing."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def kill_sessions(leaders: Iterable[int]) -> None:
    """Kills the process groups led by these processes; ones that are gone already are passed over."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(leader) == leader:
                os.killpg(leader, signal.SIGKILL)
