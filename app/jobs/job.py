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

from app.jobs.messages import Done, Failed, Question, Update
from simplan.errors import RunError, SimplanError

__all__ = ["BackgroundJob", "Jobs", "State", "python"]

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


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


class BackgroundJob:
    """One piece of work. Its attributes are read by pages while a thread of its own changes them.

    Attributes:
        update: How far it is; None before it says so.
        value: What is known so far, and at the end what came of it.
        error: Why there is nothing.
        ended: Set at the end.
        started_s, seconds: When it started, and how long it took; by the monotonic clock.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.state = State.WAITING
        self.update: Update | None = None
        self.value: Any = None
        self.error: SimplanError | None = None
        self.stopped = False
        self.ended = threading.Event()
        self.seconds = 0.0
        self.started_s = time.monotonic()
        self._num_waiting = 0
        self._watched_s = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Says that somebody looks; work that nobody looks at for long is stopped."""
        self._watched_s = time.monotonic()

    def join(self) -> bool:
        """One more waits for it; False when it was given up a moment ago."""
        with self._lock:
            if self.stopped:
                return False
            self._num_waiting += 1
            return True

    def leave(self) -> None:
        """One waits no more; what nobody waits for is not begun."""
        with self._lock:
            self._num_waiting -= 1
            given_up = not self._num_waiting and self.state is State.WAITING
        if given_up:
            self.stop()

    def stop(self) -> None:
        """Asks it to end with what it has, and ends it when it does not; what is not begun ends at once."""
        with self._lock:
            if self.state is State.ENDED:
                return
            self.stopped = True
            if self._child is None:
                self._set_ended()
                return
            self.state, child = State.STOPPING, self._child
        if self.update is None:
            child.kill()  # it has nothing to end with
        else:
            child.send_signal(signal.SIGINT)
            threading.Timer(_GRACE_S, child.kill).start()

    def run(self, child: subprocess.Popen[bytes]) -> bool:
        """Asks a worker and listens to the end; for the thread of the job.

        Returns:
            Whether the worker can be asked again.
        """
        with self._lock:
            if self.state is State.ENDED:
                return True
            self._child, self.state = child, State.RUNNING
        self.started_s = time.monotonic()
        answered = False
        try:
            assert child.stdin is not None
            child.stdin.write(pickle.dumps(self.question))
            child.stdin.flush()
            self._listen(child)
            answered = True
        except (EOFError, OSError, pickle.UnpicklingError):
            if not self.stopped:
                self.error = RunError(
                    "the process that works this out ended, most likely for want of memory; ask again, or something "
                    "smaller"
                )
        with self._lock:
            self.seconds = time.monotonic() - self.started_s
            self._set_ended()
            return answered and not self.stopped

    def run_here(self) -> None:
        """Does the work in this thread."""
        self._take(self.question.answer(self._take))
        with self._lock:
            self._set_ended()

    def _set_ended(self) -> None:
        self.state, self._child = State.ENDED, None
        self.ended.set()

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        while not self._take(pickle.load(child.stdout)):
            if time.monotonic() - self._watched_s > _UNWATCHED_S:
                self.stop()

    def _take(self, message: Update | Done | Failed) -> bool:
        """Remembers what it is told; whether that was the last of it."""
        if isinstance(message, Failed):
            self.error = message.error()
        elif isinstance(message, Done):
            self.value = message.value
        else:
            self.update = message
            if message.value is not None:
                self.value = message.value
            return False
        return True


class Jobs:
    """Jobs of a server: equal questions are asked once, a few run at a time, and workers wait ready.

    Args:
        at_once: How many run at a time; 0 for work that is done where it is asked for.
        keep: Workers are asked again, else each works once.
    """

    def __init__(self, at_once: int, *, keep: bool = False) -> None:
        self._at_once, self._keep = at_once, keep
        self._slots = threading.Semaphore(at_once)
        self._jobs: OrderedDict[Hashable, BackgroundJob] = OrderedDict()
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def warm(self) -> None:
        """Gets a worker ready, or all that are kept."""
        with self._lock:
            self._idle = [child for child in self._idle if child.poll() is None]
            while len(self._idle) < (self._at_once if self._keep else 1):
                self._idle.append(_worker())

    def find(self, key: Hashable) -> BackgroundJob | None:
        """The job of a question, if it was asked."""
        with self._lock:
            return self._jobs.get(key)

    def forget(self, key: Hashable) -> None:
        """Keeps the answer of a question no longer; who waits for it has it."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and job.state is State.ENDED:
                del self._jobs[key]

    def busy(self) -> bool:
        """Whether something runs or waits."""
        with self._lock:
            return any(job.state is not State.ENDED for job in self._jobs.values())

    def waiting(self) -> int:
        """How many wait for others to end."""
        with self._lock:
            return sum(job.state is State.WAITING for job in self._jobs.values())

    def start(self, key: Hashable, question: Question) -> BackgroundJob:
        """The job of a question: the one that runs or has its answer, else a new one.

        Args:
            key: Equal for equal questions.
            question: What is to be done.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and (job.state is not State.ENDED or not (job.stopped or job.error)):
                self._jobs.move_to_end(key)
                return job
            job = self._jobs[key] = BackgroundJob(question)
            self._jobs.move_to_end(key)
            for old in [old for old, other in self._jobs.items() if other.state is State.ENDED][:-_MOST_KEPT]:
                del self._jobs[old]
        if self._at_once:
            threading.Thread(target=self._run, args=(job,), daemon=True).start()
        else:
            try:
                job.run_here()
            finally:
                job.stop()  # where it ended in an error of ours
        return job

    def close(self) -> None:
        """Ends everything."""
        with self._lock:
            jobs, idle, self._idle = list(self._jobs.values()), self._idle, []
        for job in jobs:
            job.stop()
        for child in idle:
            _end(child)

    def _run(self, job: BackgroundJob) -> None:
        with self._slots:
            if job.state is State.ENDED:
                return
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None or child.poll() is not None:
                child = _worker()
            if job.run(child) and self._keep:
                with self._lock:
                    self._idle.append(child)
            else:
                _end(child)
