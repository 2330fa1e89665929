"""The life of one rank: ``python -m executor.launch.rank MODULE ARGS``, started by torchrun.

Ties the rank's life to its parent's before the rank's program is imported: importing torch takes seconds, in which the
parent may be killed. That is why this module imports next to nothing.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from executor.launch.watchdog import Heartbeat, RankState

__all__ = [
    "PARENT_VARIABLE",
    "RankFiles",
    "StopRequest",
    "die_with_parent",
    "folder_of",
    "live_as_rank",
    "main",
    "num_kernel_kills",
    "unfinished_error_file",
]

PARENT_VARIABLE = "SIMPLAN_PARENT"
"""Environment variable in which a process tells its children its id."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process a signal when its parent ends, however that happens; elsewhere does nothing.

    A parent that has told its id in ``PARENT_VARIABLE`` may have ended before this call: then the signal comes now.
    """
    if sys.platform != "linux":
        return
    parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), number)


def num_kernel_kills() -> int:
    """How many processes Linux has killed on this host for want of memory since it started; elsewhere 0."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


_STOP_S = 15.0  # for a step and a checkpoint; torchrun kills after 30 s, Kubernetes and Slurm too
_TERMINATED = 128 + signal.SIGTERM


class RankFiles:
    """The files of one rank in the folder of a run; its output and its error are in torchrun's log folder.

    Attributes:
        heartbeat: Its signs of life (binary).
        dump: What Flight Recorder knows, written when the rank hangs (pickle).
        steps: One JSON line per finished step, written by ``run`` jobs.
        checkpoints: One JSON line per checkpoint, of rank 0.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.heartbeat = folder / f"rank{rank}.heartbeat"
        self.dump = folder / f"rank{rank}.flight"
        self.steps = folder / f"rank{rank}.steps.jsonl"
        self.checkpoints = folder / f"rank{rank}.checkpoints.jsonl"


def folder_of(out_dir: Path, num_asked: int, num_ranks: int) -> Path:
    """Where ranks write: the folder of the run, or one in it where fewer of them run than were asked for."""
    if num_ranks == num_asked:
        return out_dir
    folder = out_dir / f"on-{num_ranks}-ranks"
    folder.mkdir(exist_ok=True, parents=True)
    return folder


def unfinished_error_file(file: Path) -> Path:
    """Where a rank begins its error file, which has its name when it is whole."""
    return file.with_suffix(".unfinished")


class StopRequest:
    """Whether this rank is told to stop (SIGTERM or SIGINT), noticed also while it is stuck in a collective.

    A thread is told of signals: handlers in Python run between two instructions of the main thread, which may wait for
    ever. Who cannot take a checkpoint ends at once, the others when they have not stopped by themselves in 15 s.

    Args:
        heartbeat: Of this rank.
        dump: Gets Flight Recorder's dump on SIGUSR1.

    Attributes:
        can_stop: Whether the rank stops by itself after a step.
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
        """Whether it is told to stop, now or within some seconds."""
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
        self._heartbeat.beat(RankState.FINISHED, "ended, as it was told to")
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

    An exception is written to the error file that torchrun names, and ends the process at once with exit code 1:
    threads of torch may be stuck in communication with ranks that are gone.

    Args:
        folder: For the rank's files.
        body: What it does.
    """
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class WholeErrorFile(ErrorHandler):
        """Puts a whole file in its place: torch's agent fails on an empty one, as of a full disk or a kill."""

        def record_exception(self, e: BaseException) -> None:
            """As said."""
            super().record_exception(e)
            if (file := super()._get_error_file_path()) is not None:
                unfinished_error_file(Path(file)).rename(file)

        def _get_error_file_path(self) -> str | None:
            file = super()._get_error_file_path()
            return None if file is None else str(unfinished_error_file(Path(file)))

    rank = int(os.environ["RANK"])
    files = RankFiles(folder, rank)
    heartbeat = Heartbeat(files.heartbeat)
    stop = StopRequest(heartbeat, files.dump)
    try:
        record(lambda: body(heartbeat, stop, rank), WholeErrorFile())()
    except BaseException as error:  # also SystemExit: whatever ends a rank early is told
        if not _is_told(error):  # the heartbeat has its place on the disk already
            full = isinstance(error, OSError) and error.strerror
            why = f"{full} in the folder of the run" if full else f"{type(error).__name__}: {error}"
            heartbeat.beat(RankState.FAILED, why)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1)
    heartbeat.beat(RankState.FINISHED, "finished")


def _is_told(error: BaseException) -> bool:
    """Whether torchrun's error file has what ended this rank."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    return isinstance(error, Exception) and file.is_file()


def main() -> None:
    """Runs the module named by the first argument as the main program, with the arguments after it."""
    die_with_parent()
    del sys.argv[0]  # run_module puts the path of the module into the new first place
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
