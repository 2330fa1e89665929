"""Exclusive use of a folder or a file: a lock that Linux releases when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from simplan.errors import Problem, SpecError, file_error

_NAME = ".lock"


@contextmanager
def exclusive(path: Path, field: str, *, is_file: bool = False, role: str = "") -> Iterator[None]:
    """Hold a folder or a file alone while the block runs.

    The lock is a file: in the folder, which is made if missing, or next to the file. It is gone afterwards, except
    after a killed process, whose lock file holds nobody up.

    Args:
        field: Option that named the path, for the error.
        role: Distinguishes locks of one folder: a command and the executor that it starts each take their own.

    Raises:
        SpecError: Another process holds it, and is named; or the lock cannot be written.
    """
    lock = path.with_name(f".{path.name}{_NAME}") if is_file else path / f"{_NAME}{role}"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquired(lock)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise file_error(str(path), rule, "check that its folder exists and may be written") from None
    if handle is None:
        rule = f"is in use by {_holder(lock)}"
        fix = f"wait for it, or name another {'file' if is_file else 'folder'}"
        raise SpecError(Problem(field=field, value=str(path), rule=rule, fix=fix))
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before it is released, so that nobody can hold the old file
        os.close(handle)


def _acquired(lock: Path) -> int | None:
    """Handle of the locked file; None if another process has it."""
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        if _is_file(lock, handle):
            break
        os.close(handle)  # its holder has deleted it meanwhile
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # of python -m simplan
    command = shlex.join([name, *sys.argv[1:]])
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%H:%M:%S}"}
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps({**holder, "command": command[:200]}).encode())
    return handle


def _is_file(lock: Path, handle: int) -> bool:
    try:
        return os.path.samestat(lock.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(lock: Path) -> str:
    """The process that has the lock, in words."""
    try:
        told = json.loads(lock.read_text())
        where = "" if told["host"] == socket.gethostname() else f" on {told['host']}"
        return f"process {told['pid']}{where} since {told['since']} ({told['command']})"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"
