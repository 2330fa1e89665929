"""The executor as a process: simplan starts it, reads its progress events, and stops it on a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from simplan.children import exit_code, terminate_child
from simplan.cli.terminal.output import say
from simplan.errors import Problem, RunError, SpecError

_GRACE_S = 25.0  # Kubernetes and Slurm kill after 30 s by default
_TERMINATED = 128 + signal.SIGTERM
ROOT = Path(__file__).resolve().parents[3]

Event = dict[str, Any]


class ExecutorKilledError(RunError):
    """A signal ended the executor, which could not collect the measurement."""


def require_executor() -> None:
    """Checks that torch and the executor are installed.

    Raises:
        SpecError: torch is missing; names the extra to install.
    """
    if find_spec("torch") is None:
        rule = "running and calibrating need torch, which is not installed here"
        raise SpecError(Problem(field="", rule=rule, fix='install it with: pip install "simplan[executor]"'))


def child_environment() -> dict[str, str]:
    """Environment of a child process, which imports from our search path and nothing from its working directory."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def end_child(child: subprocess.Popen[Any], grace_s: float) -> None:
    """Requests a clean stop of a child and its ranks; kills them after a grace period."""
    terminate_child(child)  # heeded also where Ctrl-C is ignored, as a shell's background jobs do
    if exit_code(child, grace_s) is None:
        os.killpg(child.pid, signal.SIGKILL)


def run_executor(args: list[str], on_event: Callable[[Event], None]) -> None:
    """Runs ``python -m executor ARGS`` to its end.

    On Ctrl-C, SIGTERM or SIGHUP the executor is told to stop its ranks, and killed after 25 s.

    Args:
        args: ``run JOB.json --out DIR`` or ``calibrate REQUEST.json --out FILE``.
        on_event: Called with each progress event.

    Raises:
        SpecError: torch is missing, or the executor rejected the job.
        RunError: Ranks failed or hung; ``ExecutorKilledError`` if a signal ended the executor itself.
        KeyboardInterrupt: The executor was interrupted.
    """
    require_executor()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages, ending_signals_raise():
        child = subprocess.Popen(
            [sys.executable, "-m", "executor", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env=child_environment(),
            start_new_session=True,  # a terminal's Ctrl-C reaches us only, and we pass it on once
        )
        try:
            for event in _events(child):
                on_event(event)
            code = exit_code(child)
        except BaseException:
            _end(child)
            raise
        finally:
            if child.stdout is not None:
                child.stdout.close()
        messages.seek(0)
        said = messages.read().strip()
    assert code is not None
    _raise_for(code, said)


def _events(child: subprocess.Popen[str]) -> Iterator[Event]:
    assert child.stdout is not None
    for line in child.stdout:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # output of a library, not an event
        if isinstance(event, dict):
            yield event


def _end(child: subprocess.Popen[str]) -> None:
    """Requests a clean stop first; a second interrupt kills immediately."""
    try:
        if exit_code(child, 0.0) is None:
            say("stopping the ranks (Ctrl-C again kills them immediately)")
            end_child(child, _GRACE_S)
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGKILL)
    finally:
        exit_code(child)


def _raise_for(code: int, said: str) -> None:
    said = said.removeprefix("error: ")
    if code == 0:
        return
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code == SpecError.exit_code and said:
        raise SpecError(Problem(field="", rule=said))
    if code == RunError.exit_code and said:
        raise RunError(said)
    if code == _TERMINATED:
        raise SystemExit(code)
    last = f": {said.splitlines()[-1]}" if said else ""
    if code < 0:
        raise ExecutorKilledError(f"the executor was killed by signal {-code}{last}")
    raise RunError(f"the executor ended with exit code {code}{last}")


@contextmanager
def ending_signals_raise() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end this process as Ctrl-C does, so that no rank keeps running."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
