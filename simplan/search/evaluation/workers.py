"""Worker processes over which a search spreads its calls, once it has proved long."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from multiprocessing import current_process
from queue import Empty
from types import FrameType, TracebackType
from typing import Any, Protocol, Self, TypeVar

from simplan.sim.compiled import load_compiled

_ALONE_S = 1.5  # seconds in this process before workers start: most searches take less
_PER_WORKER = 3  # calls under way per worker, so that it has the next one when it ends one
_WATCH_S = 1.0  # seconds between a worker's looks at its parent
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMBA", "VECLIB")}

Key = TypeVar("Key")
Result = TypeVar("Result")
Arguments = tuple[Any, ...]


class WorkerPool:
    """Processes for the calls of a search; a context manager that ends them.

    Calls run in this process for the first seconds, and until a worker is ready.

    Args:
        jobs: Worker processes, or workers of the active joblib backend; -1 for one per core, 1 for none.
    """

    def __init__(self, jobs: int = 1) -> None:
        self._jobs = 1 if current_process().daemon else jobs  # daemons may not have children
        self._begun_s = time.monotonic()
        self._pool: _Pool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.end()

    def each(
        self, function: Callable[..., Result], calls: Iterable[tuple[Key, Arguments]]
    ) -> Iterator[tuple[Key, Result]]:
        """Yield the results of calls in order, with the keys of the calls; workers run the next calls meanwhile.

        Args:
            function: Function at the top of a module, or a method.
            calls: Key and arguments of each call. Iterated in this process, only as far as workers have room.
        """
        calls = iter(calls)
        while (pool := self._ready_pool()) is None:
            call = next(calls, None)
            if call is None:
                return
            key, arguments = call
            yield key, function(*arguments)
        yield from pool.each(function, calls)

    def _ready_pool(self) -> _Pool | None:
        """The workers; None until one of them is ready."""
        if self._jobs == 1 or time.monotonic() - self._begun_s <= _ALONE_S:
            return None
        if self._pool is None:
            self._pool = _started_pool(self._jobs)
            if self._pool is None:
                self._jobs = 1
                return None
        return self._pool if self._pool.is_ready else None


class _Pool(Protocol):
    """Workers that have been started."""

    @property
    def is_ready(self) -> bool:
        """True once the first worker can take calls."""

    def each(
        self, function: Callable[..., Result], calls: Iterator[tuple[Key, Arguments]]
    ) -> Iterator[tuple[Key, Result]]:
        """See ``WorkerPool.each``."""

    def end(self) -> None:
        """End the workers, and drop the calls under way."""


def _started_pool(jobs: int) -> _Pool | None:
    """Own processes, or the workers of the joblib backend that the caller has chosen; None where there is only one."""
    from joblib import effective_n_jobs
    from joblib.parallel import LokyBackend, get_active_backend

    number = int(effective_n_jobs(jobs))
    if number == 1:
        return None
    return _Processes(number) if isinstance(get_active_backend()[0], LokyBackend) else _JoblibWorkers(number)


class _Processes:
    """Processes of this search alone."""

    def __init__(self, number: int) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        self._room = _PER_WORKER * number
        with _interrupts_blocked():  # its children do not get them: Ctrl-C is for this process, which ends them
            self._executor = ProcessPoolExecutor(
                number, initializer=_set_up_worker, initargs=(os.getpid(),), env=_ONE_THREAD
            )
            self._starting = [self._executor.submit(load_compiled) for _ in range(number)]

    @property
    def is_ready(self) -> bool:
        return any(start.done() for start in self._starting)

    def each(
        self, function: Callable[..., Result], calls: Iterator[tuple[Key, Arguments]]
    ) -> Iterator[tuple[Key, Result]]:
        under_way: deque[tuple[Key, Callable[[], Result]]] = deque()
        for key, arguments in calls:
            under_way.append((key, self._begin(function, arguments)))
            if len(under_way) == self._room:
                first, result = under_way.popleft()
                yield first, result()
        for key, result in under_way:
            yield key, result()

    def _begin(self, function: Callable[..., Result], arguments: Arguments) -> Callable[[], Result]:
        """Begin a call; what is returned waits for its result."""
        here = partial(function, *arguments)  # if workers were killed, for instance where memory is short
        try:
            future = self._executor.submit(function, *arguments)
        except BrokenExecutor:
            return here

        def result() -> Result:
            try:
                returned: Result = future.result()
            except BrokenExecutor:
                return here()
            return returned

        return result

    def end(self) -> None:
        with suppress(Empty):
            while True:  # loky fails if it ends while calls wait for their turn
                self._executor._work_ids.get_nowait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of loky, where there is no pgrep to look for grandchildren
            self._executor.shutdown(wait=True, kill_workers=True)


class _JoblibWorkers:
    """Workers of the joblib backend that the caller has chosen, such as Dask's; they get calls in batches."""

    is_ready = True

    def __init__(self, number: int) -> None:
        self._number = number

    def each(
        self, function: Callable[..., Result], calls: Iterator[tuple[Key, Arguments]]
    ) -> Iterator[tuple[Key, Result]]:
        from joblib import Parallel, delayed

        pool = Parallel(n_jobs=self._number, batch_size=1)
        while batch := list(islice(calls, _PER_WORKER * self._number)):
            results = pool(delayed(function)(*arguments) for _, arguments in batch)
            yield from zip((key for key, _ in batch), results, strict=True)

    def end(self) -> None:
        pass  # they are the caller's


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Keep Ctrl-C from this thread for a moment, and from processes and threads that it starts for good.

    Another thread may take the signal in the meantime, and Python then calls the handler in the main thread, so that is
    put off as well: a worker whose start is broken off prints a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    from multiprocessing.resource_tracker import ensure_running

    ensure_running()  # as it starts, Python 3.11 lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    put_off: list[tuple[int, FrameType | None]] = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *of: put_off.append(of)) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if put_off and callable(handler):
            handler(*put_off[0])


def _set_up_worker(parent: int) -> None:
    """Make this worker end with its parent, also one that was killed, and leave it to that to tell of compilations."""
    logging.getLogger("simplan.jit").setLevel(logging.ERROR)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
