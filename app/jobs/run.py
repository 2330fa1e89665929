"""Runs on this machine: ``simplan run`` as a process, one at a time per server, each in a separate folder."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import threading
import time
from functools import cache
from pathlib import Path

from app.jobs.job import python
from simplan.cli.dashboard import RUN_FLAG
from simplan.errors import Problem, SpecError
from simplan.io import write_text

_WORKSPACE = Path("simplan-out") / "dashboard"
_MAX_SHOWN = 4_000


def may_run() -> bool:
    """True when pages may start runs: on a local server, or with the server's ``--allow-run``."""
    return os.environ.get(RUN_FLAG) == "1"


class Run:
    """One run.

    Attributes:
        folder: Folder of the run's files.
        num_steps: Number of measured steps.
    """

    def __init__(self, text: str, name: str, num_steps: int) -> None:
        safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60] or "run"
        self.folder = _WORKSPACE.absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
        self.num_steps = num_steps
        self.stopped = False
        self._begun_s = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "scenario.yaml", text)
        arguments = ["run", str(self.folder / "scenario.yaml"), "-o", str(self.folder), "--steps", str(num_steps)]
        with (self.folder / "stderr.txt").open("wb") as stderr:
            self._child = python(
                "-m", "simplan", *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
            )

    @property
    def is_going(self) -> bool:
        """True while the run's process is alive."""
        return self._child.poll() is None

    @property
    def failed(self) -> bool:
        """True when the run ended with a nonzero exit code."""
        return self._child.poll() not in (None, 0)

    @property
    def steps_done(self) -> int:
        """Steps of rank 0 so far, warmup steps included."""
        try:
            return (self.folder / "rank0.steps.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    @property
    def progress(self) -> tuple[float, str]:
        """Completed fraction of the current part, calibration or steps, and its description."""
        if done := self.steps_done:
            return done / (self.num_steps + 2), f"step {done}"
        line = (self.stderr_tail.splitlines() or ["starting"])[-1]
        counted = re.search(r": (\d+) of (\d+)$", line)
        share = int(counted[1]) / max(1, int(counted[2])) if counted else 0.0
        return share, f"{line} ({time.monotonic() - self._begun_s:.0f} s)"

    @property
    def stderr_tail(self) -> str:
        """End of the run's stderr."""
        try:
            return (self.folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")[-_MAX_SHOWN:].strip()
        except OSError:
            return ""

    def stop(self) -> None:
        """Sends SIGINT, on which the run stops its ranks."""
        self.stopped = True
        if self.is_going:
            self._child.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Stops the run and waits for its end."""
        self.stop()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()


class ServerRuns:
    """Runs of a server: one at a time; the last run is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last: Run | None = None

    def start(self, text: str, name: str, num_steps: int) -> Run:
        """Starts a run.

        Raises:
            SpecError: Pages may not start runs here, or another run is in progress.
        """
        if not may_run():
            rule = "may not be started from this page: others than this machine reach the server"
            raise SpecError(Problem(field="", value="a run", rule=rule, fix="start it with --allow-run"))
        with self._lock:
            if self.last is not None and self.last.is_going:
                rule = "is going on, and two at a time would disturb each other's times"
                raise SpecError(Problem(field="", value="a run", rule=rule, fix="wait for it or stop it"))
            self.last = Run(text, name, num_steps)
            return self.last

    def close(self) -> None:
        """Stops the current run, if any."""
        if self.last is not None and self.last.is_going:
            self.last.close()


@cache
def runs() -> ServerRuns:
    """The server's runs; a run in progress ends with the server."""
    server_runs = ServerRuns()
    atexit.register(server_runs.close)
    return server_runs
