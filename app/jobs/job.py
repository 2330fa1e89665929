"""Tasks in worker processes, seen from the server: progress, result and stop.

Server and workers exchange pickled messages; both sides run the same version of the code.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from app.jobs.limits import Limits, Usage, memory_limit_bytes, process_bytes
from simplan.errors import RunError, SimplanError

WORKERS = "SIMPLAN_WORKERS"
"""Environment variable with the number of worker processes for pages; without it, pages compute themselves."""

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 10.0
_LOOK_S = 0.5
_PAGE_S, _LEFT_S = 600.0, 5.0  # a page that is drawn again waits again within seconds
_SEARCH_S, _UNWATCHED_S = 7200.0, 90.0
_SMALL_S = 15.0
_MAX_KEPT = 64


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Request to a worker: a function with arguments.

    Attributes:
        task: A function of a module, without Streamlit.
        args, kwargs: Plain data.
        reports_progress: True when the task reports progress: it gets an additional argument ``report``, a ``Report``.
    """

    task: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reports_progress: bool = False

    def run(self, report: Report) -> Done | Failed:
        """Runs the task; errors of simplan become a ``Failed``, bugs are raised."""
        more = {"report": report} if self.reports_progress else {}
        try:
            return Done(self.task(*self.args, **self.kwargs, **more))
        except SimplanError as error:
            return Failed(error)


class Update(NamedTuple):
    """Progress of a task.

    Attributes:
        done, total: Completed and total units of work.
        doing: Description of the current work.
        value: Intermediate result; None for none.
        left_s: Upper estimate of the remaining seconds of the current work; None while it is unknown.
    """

    done: int
    total: int
    doing: str
    value: Any = None
    left_s: float | None = None


Report = Callable[[Update], object]


class Begun(NamedTuple):
    """Start of a task: its worker has loaded its modules."""


class Done(NamedTuple):
    """End of a task, with its result."""

    value: Any


class Failed(NamedTuple):
    """End of a task, with the error that the task raised."""

    error: SimplanError


class JobState(StrEnum):
    """State of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


def python(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """Starts Python with simplan's packages in a separate session, independent of the server's working directory."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True, **more)


def _worker() -> subprocess.Popen[bytes]:
    return python("-m", "app.jobs.worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


class StartedJob:
    """One task in a worker process. Pages read the attributes while the job's thread changes them.

    Attributes:
        update: Latest progress; None before the first update.
        value: Intermediate result, and finally the result; None before the first one.
        error: Error that ended the job; None without an error.
        reached: Sentence on the limit that ended the job; empty without one.
        ended: Event that is set at the end.
        started_s, seconds: Start and duration in seconds, by the monotonic clock.
    """

    def __init__(self, request: TaskRequest) -> None:
        self.request = request
        self.state = JobState.WAITING
        self.update: Update | None = None
        self.value: Any = None
        self.error: SimplanError | None = None
        self.stopped = False
        self.reached = ""
        self.ended = threading.Event()
        self.seconds = 0.0
        self.started_s = time.monotonic()
        self._is_begun = False
        self._num_waiting = 0
        self._watched_s = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Marks the job as watched; a job that no page watches or waits for is stopped."""
        self._watched_s = time.monotonic()

    def join(self) -> bool:
        """Adds a waiting page; False when the job was just given up."""
        with self._lock:
            if self.stopped:
                return False
            self._num_waiting += 1
            return True

    def leave(self) -> None:
        """Removes a waiting page; a job that no page waits for is not started, or is stopped soon."""
        self.watch()
        with self._lock:
            self._num_waiting -= 1
            given_up = not self._num_waiting and self.state is JobState.WAITING
        if given_up:
            self.stop()

    def result(self) -> Any:
        """Result of a job that has ended.

        Raises:
            SimplanError: The error that ended the job.
        """
        if self.error is not None:
            raise self.error
        return self.value

    def stop(self) -> None:
        """Interrupts the job, which returns its results so far, or kills it; a waiting job ends immediately."""
        with self._lock:
            if self.state is JobState.ENDED:
                return
            self.stopped = True
            if self._child is None:
                self._set_ended()
                return
            self.state, child = JobState.STOPPING, self._child
        if self.update is None:
            child.kill()  # it has nothing to end with
        else:
            child.send_signal(signal.SIGINT)
            threading.Timer(_GRACE_S, child.kill).start()

    def run(self, child: subprocess.Popen[bytes], limits: Limits, may_go_on: Callable[[float], bool]) -> bool:
        """Sends the request to a worker and reads messages to the end; runs in the thread of the job.

        Args:
            child: Worker without a task.
            limits: Limits of the job; the job is stopped at the first one that it reaches.
            may_go_on: Called now and then with the seconds so far; False makes the job wait again, to begin anew.

        Returns:
            True when the worker can take another request.
        """
        with self._lock:
            if self.state is JobState.ENDED:
                return True
            self._child, self.state = child, JobState.RUNNING
        self.started_s, self._is_begun = time.monotonic(), False
        over = threading.Event()
        guard = threading.Thread(target=self._guard, args=(child, limits, may_go_on, over), daemon=True)
        guard.start()
        answered = False
        try:
            assert child.stdin is not None
            child.stdin.write(pickle.dumps(self.request))
            child.stdin.flush()
            self._listen(child)
            answered = True
        except (EOFError, OSError, pickle.UnpicklingError):
            if not self.stopped and self.state is JobState.RUNNING:
                self.error = RunError("the worker process ended, most likely out of memory; try a smaller job")
        over.set()
        guard.join()
        with self._lock:
            if self.state is JobState.WAITING and not answered:
                return False
            self.seconds = time.monotonic() - self.started_s
            if self.reached and self.value is None:
                self.error = RunError(self.reached)
            self._set_ended()
            return answered and not self.stopped

    def _guard(
        self,
        child: subprocess.Popen[bytes],
        limits: Limits,
        may_go_on: Callable[[float], bool],
        over: threading.Event,
    ) -> None:
        """Stops the job at a limit, or lets it wait again; tasks without progress are guarded as well."""
        while not over.wait(_LOOK_S):
            now_s = time.monotonic()
            running_s = now_s - self.started_s if self._is_begun else 0.0
            unread_s = 0.0 if self._num_waiting else now_s - self._watched_s
            reached = limits.reached(Usage(running_s, unread_s, partial(process_bytes, child.pid)))
            if reached is not None:
                self.reached = reached
                self.stop()
                return
            if not may_go_on(running_s) and self._wait_again(child):
                return

    def _wait_again(self, child: subprocess.Popen[bytes]) -> bool:
        """Takes a running job from its worker; False for one that is ending."""
        with self._lock:
            if self.state is not JobState.RUNNING:
                return False
            self.state, self._child = JobState.WAITING, None
        child.kill()
        return True

    def run_here(self) -> None:
        """Runs the job in this thread."""
        self._take(self.request.run(self._take))
        with self._lock:
            self._set_ended()

    def _set_ended(self) -> None:
        self.state, self._child = JobState.ENDED, None
        self.ended.set()

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        while not self._take(pickle.load(child.stdout)):
            pass

    def _take(self, message: Begun | Update | Done | Failed) -> bool:
        """Stores a message of the worker; True for the last message."""
        if isinstance(message, Begun):
            self.started_s, self._is_begun = time.monotonic(), True
            return False
        if isinstance(message, Failed):
            self.error = message.error
        elif isinstance(message, Done):
            self.value = message.value
        else:
            self.update = message
            if message.value is not None:
                self.value = message.value
            return False
        return True


class Jobs:
    """Jobs of a server: equal requests run once, a limited number runs concurrently, and idle workers are ready.

    Args:
        max_running: Maximum number of concurrent jobs; 0 runs jobs in the calling thread, without limits.
        limits: Limits of each job.
        keep: Reuse workers; otherwise each worker runs one job.
        small_s: Reserve one of several workers for small jobs, which end within these seconds; None reserves none.
            All other workers may run large jobs. One job more that turns out to be large ends, waits, and begins anew.
    """

    def __init__(self, max_running: int, limits: Limits, *, keep: bool = False, small_s: float | None = None) -> None:
        self._max_running, self._limits, self._keep = max_running, limits, keep
        self._small_s = small_s if max_running > 1 else None
        self._slots = threading.Semaphore(max_running)
        self._large_slots = threading.Semaphore(max(0, max_running - 1))
        self._closed = False
        self._jobs: OrderedDict[Hashable, StartedJob] = OrderedDict()
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def warm(self) -> None:
        """Starts an idle worker, or all workers if they are reused."""
        with self._lock:
            self._idle = [child for child in self._idle if child.poll() is None]
            while len(self._idle) < (self._max_running if self._keep else 1):
                self._idle.append(_worker())

    def find(self, key: Hashable) -> StartedJob | None:
        """Job of a request; None if there is none."""
        with self._lock:
            return self._jobs.get(key)

    def forget(self, key: Hashable) -> None:
        """Removes a job and its result from the cache; callers that wait for it still get the result."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and job.state is JobState.ENDED:
                del self._jobs[key]

    def busy(self) -> bool:
        """True when a job runs or waits."""
        with self._lock:
            return any(job.state is not JobState.ENDED for job in self._jobs.values())

    def waiting(self) -> int:
        """Number of jobs that wait for a free slot."""
        with self._lock:
            return sum(job.state is JobState.WAITING for job in self._jobs.values())

    def start(self, key: Hashable, request: TaskRequest) -> StartedJob:
        """Job of a request: the running or finished job with the key, else a new one."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and (job.state is not JobState.ENDED or not (job.stopped or job.error)):
                self._jobs.move_to_end(key)
                return job
            job = self._jobs[key] = StartedJob(request)
            self._jobs.move_to_end(key)
            for old in [old for old, other in self._jobs.items() if other.state is JobState.ENDED][:-_MAX_KEPT]:
                del self._jobs[old]
        if self._max_running:
            threading.Thread(target=self._run, args=(job,), daemon=True).start()
        else:
            try:
                job.run_here()
            finally:
                job.stop()  # after an internal error
        return job

    def close(self) -> None:
        """Ends everything."""
        with self._lock:
            self._closed = True
            jobs, idle, self._idle = list(self._jobs.values()), self._idle, []
        for job in jobs:
            job.stop()
        for child in idle:
            _end(child)

    def _run(self, job: StartedJob) -> None:
        with self._slots:
            is_large = self._run_on_worker(job, is_large=False)
        if is_large and job.state is JobState.ENDED:
            self._large_slots.release()
        elif job.state is not JobState.ENDED:
            with self._large_slots, self._slots:
                self._run_on_worker(job, is_large=True)

    def _run_on_worker(self, job: StartedJob, *, is_large: bool) -> bool:
        """Runs a job to its end, or until it must wait as a large one; True if it has a slot of the large jobs."""

        def may_go_on(running_s: float) -> bool:
            nonlocal is_large
            if not is_large and self._small_s is not None and running_s > self._small_s:
                is_large = self._large_slots.acquire(blocking=False)
                return is_large
            return True

        if job.state is JobState.ENDED:
            return is_large
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is None or child.poll() is not None:
            child = _worker()
        reusable = job.run(child, self._limits, may_go_on)
        if not (reusable and self._keep):
            _end(child)
            child = _worker() if self._keep and not self._closed else None  # ready before the next request
        if child is not None and not self._keeps(child):
            _end(child)
        return is_large

    def _keeps(self, child: subprocess.Popen[bytes]) -> bool:
        """Adds a worker to the idle ones; False if all have ended."""
        with self._lock:
            if not self._closed:
                self._idle.append(child)
            return not self._closed


@cache
def searches() -> Jobs:
    """Searches and predictions of published runs, for all sessions; the jobs end with the server."""
    limits = Limits(_SEARCH_S, memory_limit_bytes(), _UNWATCHED_S)
    jobs = Jobs(max(1, os.cpu_count() or 1), limits)
    atexit.register(jobs.close)
    return jobs


@cache
def page_jobs() -> Jobs:
    """Other jobs that pages wait for, for all sessions; the workers end with the server."""
    limits = Limits(_PAGE_S, memory_limit_bytes(), _LEFT_S)
    jobs = Jobs(int(os.environ.get(WORKERS, "0")), limits, keep=True, small_s=_SMALL_S)
    atexit.register(jobs.close)
    return jobs
