"""Processes that this one has started: who they are, and signals to them and to no other."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def signal_ours(pid: int, number: signal.Signals) -> bool:
    """Sends a signal to a process that this one has started, and to no other; False where there is none."""
    with suppress(ProcessLookupError):
        if is_ours(pid):
            os.kill(pid, number)
            return True
    return False


def is_ours(pid: int) -> bool:
    """True for a process that this one or a child of it has started; a heartbeat file may name any process."""
    while pid > 1:
        pid = status(pid)[1]
        if pid == os.getpid():
            return True
    return False


def children_by_rank() -> dict[int, int]:
    """Processes that this one has started as ranks, by torchrun's number, which is in their environment as RANK."""
    children = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and status(int(folder.name))[1] == os.getpid():
            with suppress(OSError):
                for variable in (folder / "environ").read_bytes().split(b"\0"):
                    name, _, value = variable.partition(b"=")
                    if name == b"RANK" and value.isdigit():
                        children[int(value)] = int(folder.name)
    return children


def status(pid: int) -> tuple[str, int]:
    """State of a process, and its parent; 0 where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    state, parent, *_ = text.rpartition(")")[2].split()  # the name before it may have brackets
    return state, int(parent)
