"""A piece of work in a worker process, as the server sees it: how far it is, what it knows, how to stop it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from enum import StrEnum
from pathlib import Path
from typing import Any

from app.jobs.messages import Done, Failed, Update
from simplan.errors import NotModelledError, RunError, SimplanError, SpecError

__all__ = ["Job", "Jobs", "State", "python"]

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 10.0
_UNWATCHED_S = 90.0
_MOST_KEPT = 64


class State(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


def python(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """Python with our packages, whatever folder the server was started in, in a session of its own."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True, **more)


def _worker() -> subprocess.Popen[bytes]:
    return python("-m", "app.jobs.worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Job:
    """One piece of work. Its attributes are read by pages while a thread of its own changes them.

    Attributes:
        update: How far it is; None before it says so.
        value: What is known so far, and at the end what came of it.
        error: Why there is nothing.
        started_s, seconds: When it started, and how long it took; by the monotonic clock.
    """

    def __init__(self, name: str, question: Any) -> None:
        self.name, self.question = name, question
        self.state = State.WAITING
        self.update: Update | None = None
        self.value: Any = None
        self.error: SimplanError | None = None
        self.stopped = False
        self.first_value_s: float | None = None
        self.seconds = 0.0
        self.started_s = time.monotonic()
        self._watched_s = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Says that somebody looks; work that nobody looks at for long is stopped."""
        self._watched_s = time.monotonic()

    def stop(self) -> None:
        """Asks it to end with what it has, and ends it when it does not."""
        with self._lock:
            if self.state is State.ENDED:
                return
            self.state, self.stopped = State.STOPPING, True
            child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGINT)
            threading.Timer(_GRACE_S, child.kill).start()

    def run(self, child: subprocess.Popen[bytes]) -> None:
        """Asks a worker and listens to the end; for the thread of the job."""
        assert child.stdin is not None
        assert child.stdout is not None
        with self._lock:
            self._child = child
            if not self.stopped:
                self.state = State.RUNNING
        self.started_s = time.monotonic()
        try:
            if not self.stopped:
                child.stdin.write(pickle.dumps((self.name, self.question)))
                child.stdin.close()
                self._listen(child)
        except (EOFError, OSError, pickle.UnpicklingError):
            if not self.stopped:
                self.error = RunError(f"the process that works on it ended (exit code {child.wait()}); start it again")
        finally:
            self.seconds = time.monotonic() - self.started_s
            with self._lock:
                self.state = State.ENDED
            child.kill()
            child.wait()
            child.stdout.close()

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        while True:
            message = pickle.load(child.stdout)
            if isinstance(message, Done):
                self.value = message.value
                return
            if isinstance(message, Failed):
                kind = NotModelledError if message.not_modelled else SpecError
                self.error = kind(message.problems) if message.problems else RunError(message.bug)
                return
            self.update = message
            if message.value is not None:
                self.value = message.value
                self.first_value_s = self.first_value_s or time.monotonic() - self.started_s
            if time.monotonic() - self._watched_s > _UNWATCHED_S:
                self.stop()


class Jobs:
    """All jobs of a server: equal questions are asked once, a few run at a time, and one worker waits ready.

    Args:
        at_once: How many run at a time.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._slots = threading.Semaphore(at_once or max(1, os.cpu_count() or 1))
        self._jobs: OrderedDict[Hashable, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._spare: subprocess.Popen[bytes] | None = None

    def warm(self) -> None:
        """Gets a worker ready."""
        with self._lock:
            if self._spare is None or self._spare.poll() is not None:
                self._spare = _worker()

    def find(self, key: Hashable) -> Job | None:
        """The job of a question, if it was asked."""
        with self._lock:
            return self._jobs.get(key)

    def busy(self) -> bool:
        """Whether something runs or waits."""
        with self._lock:
            return any(job.state is not State.ENDED for job in self._jobs.values())

    def waiting(self) -> int:
        """How many wait for others to end."""
        with self._lock:
            return sum(job.state is State.WAITING for job in self._jobs.values())

    def start(self, key: Hashable, name: str, question: Any) -> Job:
        """The job of a question: the one that runs or has its answer, else a new one.

        Args:
            key: Equal for equal questions.
            name: A task of the worker.
            question: What it takes.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and (job.state is not State.ENDED or not (job.stopped or job.error)):
                return job
            job = self._jobs[key] = Job(name, question)
            self._jobs.move_to_end(key)
            for old in [old for old, other in self._jobs.items() if other.state is State.ENDED][:-_MOST_KEPT]:
                del self._jobs[old]
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        return job

    def close(self) -> None:
        """Ends everything."""
        with self._lock:
            jobs, spare, self._spare = list(self._jobs.values()), self._spare, None
        for job in jobs:
            job.stop()
        if spare is not None:
            spare.kill()
            spare.communicate()

    def _run(self, job: Job) -> None:
        with self._slots:
            with self._lock:
                child, self._spare = self._spare, None
            if child is None or child.poll() is not None:
                child = _worker()
            job.run(child)
