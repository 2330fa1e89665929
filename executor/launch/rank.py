"""The process of one rank: ``python -m executor.launch.rank MODULE ARGS``, started by torchrun.

The process is tied to its parent before the rank's program is imported: importing torch takes seconds, in which the
parent may be killed. Therefore this module imports next to nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from executor.launch.watchdog import Heartbeat, RankState

PARENT_VARIABLE = "SIMPLAN_PARENT"
"""Environment variable with the process id of the launcher, for its children."""
ROSTER_VARIABLE = "SIMPLAN_ROSTER"
"""Environment variable of a rank: address of the store and the rank's incarnation, e.g. ``127.0.0.1:29400 1``."""
THREADS_VARIABLE = "SIMPLAN_USER_THREADS"
"""Environment variable of ranks with the user's own OMP_NUM_THREADS, which torchrun cannot tell from its default."""

LOG_FILE = "times.jsonl"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Makes Linux send this process a signal when its parent ends for any reason.

    Args:
        number: The signal.
        parent: Process that started this one, where it knows: if it has ended before this call, the signal is sent
            immediately.
    """
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the prctl call
        os.kill(os.getpid(), number)


_STOP_S = 15.0  # for a step and a checkpoint; torchrun kills after 30 s, Kubernetes and Slurm too
_TERMINATED = 128 + signal.SIGTERM


class RankFiles:
    """Files of one rank in the folder of a run; torchrun's log folder has the rank's output and error.

    Attributes:
        heartbeat: Heartbeats (binary).
        dump: Flight Recorder's dump, written when the rank hangs (pickle).
        steps: One JSON line per finished step, written by ``run`` jobs.
        checkpoints: One JSON line per checkpoint, written by rank 0.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.heartbeat = folder / f"rank{rank}.heartbeat"
        self.dump = folder / f"rank{rank}.flight"
        self.steps = folder / f"rank{rank}.steps.jsonl"
        self.checkpoints = folder / f"rank{rank}.checkpoints.jsonl"

    def texts(self) -> dict[str, str]:
        """Texts of the JSON files by name, without files that do not exist."""
        return {path.name: path.read_text() for path in (self.steps, self.checkpoints) if path.exists()}


class RunLog:
    """Log of a node's first rank, to which restarted ranks append; ``executor.profiling.run_times`` reads it.

    Args:
        out_dir: Folder of the node's files; None for a rank without a log.
    """

    def __init__(self, out_dir: Path | None) -> None:
        self._file = None if out_dir is None else out_dir / LOG_FILE

    def add(self, kind: str, step: int) -> None:
        """Ends a stretch of time now.

        Args:
            kind: ``begin`` before the first step, ``step``, or ``checkpoint``.
            step: Steps done.
        """
        if self._file is not None:
            with self._file.open("a") as stream:
                stream.write(json.dumps({"kind": kind, "step": step, "end_s": time.monotonic()}) + "\n")


def folder_of(out_dir: Path, num_asked: int, num_ranks: int) -> Path:
    """Folder of the ranks' files: that of the run, or one in it for a plan with fewer ranks than requested."""
    if num_ranks == num_asked:
        return out_dir
    folder = out_dir / f"on-{num_ranks}-ranks"
    folder.mkdir(exist_ok=True, parents=True)
    return folder


def unfinished_error_file(file: Path) -> Path:
    """Name of an error file that is being written."""
    return file.with_suffix(".unfinished")


class StopRequest:
    """Request to stop (SIGTERM or SIGINT), noticed also while the rank is stuck in a collective.

    A thread receives the signals: Python's handlers run between two instructions of the main thread, which may wait
    forever. A rank that cannot take a checkpoint ends immediately, other ranks after 15 s at the latest.

    Args:
        dump: File for Flight Recorder's dump on SIGUSR1.

    Attributes:
        can_stop: The rank stops by itself after a step.
    """

    def __init__(self, heartbeat: Heartbeat, dump: Path) -> None:
        self.can_stop = False
        self._heartbeat = heartbeat
        self._told = threading.Event()
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read_end, dump), name="signals", daemon=True).start()

    def is_told(self, within_s: float = 0.0) -> bool:
        """True when the rank receives a request to stop, now or within some seconds."""
        return self._told.wait(within_s)

    def _listen(self, read_end: int, dump: Path) -> None:
        while number := os.read(read_end, 1):
            if number[0] == signal.SIGUSR1:
                _dump_flight_recorder(dump)
            elif number[0] in (signal.SIGTERM, signal.SIGINT):
                if not self.can_stop:
                    self._end()
                self._told.set()
                timer = threading.Timer(_STOP_S, self._end)
                timer.daemon = True
                timer.start()

    def _end(self) -> None:
        self._heartbeat.beat(RankState.FINISHED, "stopped on request")
        os._exit(_TERMINATED)


def _dump_flight_recorder(file: Path) -> None:
    import torch
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None) if torch.cuda.is_available() else None
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes((dump or c10d._dump_fr_trace)())  # type: ignore[attr-defined]
    unfinished.rename(file)


def live_as_rank(folder: Path, body: Callable[[Heartbeat, StopRequest, int], None]) -> None:
    """Runs ``body(heartbeat, stop, rank)`` as the whole work of this process, which torchrun started.

    An exception is written to torchrun's error file and ends the process immediately with exit code 1: threads of
    torch may be stuck in communication with ranks that are gone.
    """
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    # torch's agent fails on an empty error file, as a full disk or a kill leaves it: only a whole one gets the name
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(unfinished_error_file(error_file))
    rank = int(os.environ["RANK"])
    files = RankFiles(folder, rank)
    heartbeat = Heartbeat(files.heartbeat)
    stop = StopRequest(heartbeat, files.dump)
    handler = ErrorHandler()
    handler.initialize()
    try:
        body(heartbeat, stop, rank)
    except BaseException as error:  # SystemExit too: every early end has a reason
        try:
            if not isinstance(error, Exception):
                heartbeat.beat(RankState.FAILED, f"{type(error).__name__}: {error}")
            else:
                handler.record_exception(error)
                unfinished_error_file(error_file).rename(error_file)
        except OSError as full:  # the heartbeat has its place on the disk already
            heartbeat.beat(RankState.FAILED, f"{full.strerror} in the folder of the run")
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1)
    heartbeat.beat(RankState.FINISHED, "finished")


def main() -> None:
    """Runs the module named by the first argument as the main program, with the arguments after it."""
    parent = os.environ.get(PARENT_VARIABLE)
    die_with_parent(parent=None if parent is None else int(parent))
    del sys.argv[0]  # run_module puts the path of the module into the new first place
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
