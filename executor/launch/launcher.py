"""Runs ranks with torchrun's elastic agent in this process, and watches those of this node.

The agent has the main thread. A second thread reads heartbeats, reports progress and kills a rank that hangs, which the
agent then takes for a failed one. No process is left behind: the agent ends the ranks, and Linux does when this process
is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from executor.launch.errors import RankEnd, RanksError, RunOverError, num_kernel_kills
from executor.launch.faults import FaultInjector
from executor.launch.nodes import LOCAL, LOOPBACK, LocalRendezvous, Rendezvous
from executor.launch.processes import is_ours, signal_ours, status
from executor.launch.rank import PARENT_VARIABLE, THREADS_VARIABLE, RankFiles
from executor.launch.watchdog import Beats, Stall, find_stall, late_in_collective, late_in_p2p, read_beat, read_dump
from simplan.errors import RunError

_POLL_S = 0.1
_DUMP_S = 2.0  # for Flight Recorder's dumps
_HEED_S = 30.0  # for torchrun to see that a rank was killed
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent.parent

_RANK_ENVIRONMENT = {
    # For glibc on CPU ranks: freed tensors stay with the process, as a caching allocator keeps them on a GPU. Without
    # it every large tensor is mapped and faulted in again, so that a kernel's time depends on what was freed before it.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}

# A rank takes at most 15 s to stop. The agent of torch 2.11 has no such setting and waits 30 s.
_SHUTDOWN: dict[str, Any] = {"shutdown_timeout": 20} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}

_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # the interface that ranks listen at
rendezvous_handler_registry.register(LOCAL, lambda parameters: LocalRendezvous())


class Start(NamedTuple):
    """Start of ranks by the agent.

    Attributes:
        ranks: Ranks of this node.
        num_ranks: Ranks of all nodes: WORLD_SIZE.
        restarts: Number of restarts after failures so far.
        meeting: Address at which these ranks meet, new at every start.
        ended_s: Time, on ``time.monotonic``'s clock, at which the ranks before had ended; None if it was not seen.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    restarts: int
    meeting: str = ""
    ended_s: float | None = None


OnLeave = Callable[[range, Mapping[int, int]], None]
"""Called with the ranks of a replica that has left, and the exit codes of those that failed."""

OnStart = Callable[[Start, RunError | None], None]
"""Called when ranks start, with the failure of the ranks before; None at first and where nodes came or left."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Request to run ranks.

    Attributes:
        module: Module that is one rank's program; its main calls ``executor.launch.rank.live_as_rank``.
        num_ranks: Ranks on this node.
        out_dir: Folder of the run, which exists; gets torchrun's log folder.
        timeout_s: A rank without a heartbeat for longer hangs.
        rendezvous: Connection to the other nodes; None for this machine alone.
        max_restarts: Restarts of all ranks after failures or hangs.
        layout: Folder of the ranks' files and number of ranks that have work, by WORLD_SIZE; other ranks are idle.
            None for ``out_dir`` and all ranks.
        rank_of: Rank by WORLD_SIZE and by torchrun's number of a process, which counts the processes of all nodes; None
            for equal numbers.
        predicted_bytes: Predicted peak memory by rank, for messages about ranks that were killed; may be empty.
        faults: Faults that the ranks are to meet; None for none.
        replica_agent: Makes the agent of replicas that may leave, each by itself; None if all ranks end together.
        on_leave: Called with the ranks of a replica of this node that has left, and why.
    """

    module: str
    args: tuple[str, ...]
    num_ranks: int
    out_dir: Path
    timeout_s: float
    rendezvous: Rendezvous | None = None
    max_restarts: int = 0
    layout: Callable[[int], tuple[Path, int]] | None = None
    rank_of: Callable[[int, int], int] | None = None
    predicted_bytes: tuple[int, ...] = ()
    faults: FaultInjector | None = None
    replica_agent: Callable[[OnLeave], Agent] | None = None
    on_leave: Callable[[range, RanksError], None] | None = None


class Logs(DefaultLogsSpecs):
    """torchrun's log folders, which the agent requests whenever it starts ranks.

    Args:
        on_start: Called with each start and its folders.
    """

    def __init__(self, log_dir: Path, on_start: Callable[[Start, LogsDest], None]) -> None:
        super().__init__(str(log_dir), redirects=Std.ALL)
        self.on_start = on_start

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Makes the folders for ranks with these environments."""
        made, first = super().reify(envs), envs[0]
        ranks = tuple(int(env["RANK"]) for env in envs.values())
        address = first.get("MASTER_ADDR", ""), first.get("MASTER_PORT", "")  # replicas that may leave have none
        meeting = f"{':'.join(address)} {first['TORCHELASTIC_RESTART_COUNT']}"
        self.on_start(Start(ranks, int(first["WORLD_SIZE"]), int(first["TORCHELASTIC_RESTART_COUNT"]), meeting), made)
        return made


class Agent:
    """torchrun's elastic agent in the main thread; tests replace this class by one that forks ranks."""

    def run(self, launch: RankLaunch, logs: Logs) -> None:
        """Returns when all ranks have finished.

        Raises:
            ChildFailedError: Ranks of this node failed, and no restart is left.
            SignalException: ``stop`` was called, or this process got a signal; ranks have ended.
            RendezvousError: The other nodes did not come.
        """
        rendezvous = launch.rendezvous
        nodes = None if rendezvous is None else rendezvous.nodes
        config = LaunchConfig(
            min_nodes=1 if nodes is None else nodes.min_nodes,
            max_nodes=1 if nodes is None else nodes.max_nodes,
            nproc_per_node=launch.num_ranks,
            run_id="simplan",
            rdzv_backend=LOCAL if rendezvous is None else "c10d",
            rdzv_endpoint="" if rendezvous is None else rendezvous.endpoint,
            rdzv_configs={} if rendezvous is None else rendezvous.torchrun_settings(),
            local_addr=LOOPBACK if rendezvous is None else rendezvous.address,
            max_restarts=launch.max_restarts,
            logs_specs=logs,
            **_SHUTDOWN,
        )
        arguments = ["-u", "-m", "executor.launch.rank", launch.module, *launch.args]
        with as_ranks(rendezvous), handlers_restored(), logging_to(launch.out_dir / "logs" / "torchrun.log"):
            try:
                launch_agent(config, sys.executable, arguments)
            except AttributeError as error:
                if error.obj is not None:
                    raise
                # torch asks for the result of an agent that was a spare when the run ended, which has none
                raise RendezvousClosedError from None

    def stop(self) -> None:
        """Makes ``run`` end the ranks and raise; called from another thread."""
        os.kill(os.getpid(), signal.SIGTERM)


def rank_environment(rendezvous: Rendezvous | None = None) -> dict[str, str]:
    """Environment of ranks, which import the packages of this process and nothing from their working folder."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    # torchrun would set and announce one thread per rank; the ranks set their own number, unless the user has.
    threads = os.environ.get(THREADS_VARIABLE, os.environ.get("OMP_NUM_THREADS", ""))
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", PARENT_VARIABLE: str(os.getpid())}
    ours |= {"OMP_NUM_THREADS": threads or "1", THREADS_VARIABLE: threads}
    if rendezvous is None:
        return {**_RANK_ENVIRONMENT, **_LOOPBACK_ONLY, **os.environ, **ours}
    # With the agents' store, ranks would look for rank 0 of the first round, which may have left.
    ours |= {**rendezvous.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**_RANK_ENVIRONMENT, **os.environ, **ours}


def launch_ranks(
    launch: RankLaunch, on_poll: Callable[[Beats], None] | None = None, on_start: OnStart | None = None
) -> None:
    """Runs this node's ranks until all have finished.

    Args:
        on_poll: Called a few times per second with the last heartbeats of this node's ranks; an exception of it ends
            the run and is raised here.

    Raises:
        RanksError: A rank raised, was killed, left early or hung; one sentence says which and why.
        RunError: The other nodes did not come.
        KeyboardInterrupt, SystemExit: This process got SIGINT or SIGTERM; ranks had the time for a checkpoint.
    """
    watch = _Watch(launch, on_poll, on_start)
    agent = watch.agent
    watch.thread.start()
    try:
        agent.run(launch, Logs(launch.out_dir / "logs", watch.ranks_start))
    except ChildFailedError as failed:
        watch.poll()
        raise watch.cause({process: failure.exitcode for process, failure in failed.failures.items()}) from None
    except SignalException as error:
        watch.end()
        if watch.raised is None and error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise watch.raised or SystemExit(128 + int(error.sigval)) from None
    except RendezvousTimeoutError:
        raise RunError(_too_few(launch)) from None
    except RendezvousClosedError:
        raise RunOverError("the run has ended on the other nodes", is_consequence=True) from None
    except (RendezvousConnectionError, RendezvousStateError) as error:
        at = launch.rendezvous.nodes.endpoint if launch.rendezvous else "this machine"
        raise RanksError(f"the store of the run at {at} cannot be reached: {error}", is_consequence=True) from None
    finally:
        watch.end()
    if watch.raised is not None:
        raise watch.raised
    watch.poll()  # the last steps


def _too_few(launch: RankLaunch) -> str:
    assert launch.rendezvous is not None
    nodes = launch.rendezvous.nodes
    least = nodes.min_nodes if nodes.min_nodes == nodes.max_nodes else f"at least {nodes.min_nodes}"
    return f"{least} nodes did not join {nodes.endpoint} within {nodes.join_timeout_s:g} s"


class _Watch:
    """The second thread and its knowledge of the running ranks.

    Attributes:
        agent: Agent of this node's ranks.
        raised: Exception that ended the thread.
    """

    def __init__(self, launch: RankLaunch, on_poll: Callable[[Beats], None] | None, on_start: OnStart | None) -> None:
        self._launch, self._on_poll, self._on_start = launch, on_poll, on_start
        make = launch.replica_agent
        self.agent = Agent() if make is None else make(self.replica_leaves)
        self._done, self._lock = threading.Event(), threading.Lock()
        self._start: Start | None = None
        self._started_s, self._kills = 0.0, 0
        self._stall: Stall | None = None
        self._stalled_s = 0.0
        self._ended_s: float | None = None
        self._files: dict[int, RankFiles] = {}  # of ranks that have work
        self._num_active = 0
        self._error_files: dict[int, Path] = {}
        self._logs: dict[int, Path] = {}
        self.raised: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def ranks_start(self, start: Start, logs: LogsDest) -> None:
        """Called by the agent when it starts ranks, with torchrun's numbers of their processes.

        Ranks of a replica that may leave start next to those of other replicas.
        """
        processes = start.ranks
        ranks = tuple(self._rank_of(start.num_ranks, process) for process in processes)
        start = start._replace(ranks=ranks, ended_s=self._ended_s)
        replaces = self._launch.replica_agent is None
        failed = replaces and self._start is not None and start.restarts > self._start.restarts
        why = self.cause(None) if failed else None  # where nodes came or left, torchrun has removed the error files
        with self._lock:
            if replaces:
                self._error_files, self._logs, self._files = {}, {}, {}
            self._stall, self._ended_s = None, None
            self._started_s, self._kills = time.monotonic(), num_kernel_kills()
            self._error_files |= {rank: Path(logs.error_files[k]) for k, rank in enumerate(start.ranks)}
            self._logs |= {rank: Path(logs.stderrs[k]) for k, rank in enumerate(start.ranks)}
            layout, out_dir = self._launch.layout, self._launch.out_dir
            folder, self._num_active = (out_dir, start.num_ranks) if layout is None else layout(start.num_ranks)
            for rank in start.ranks:
                if rank < self._num_active:
                    files = self._files[rank] = RankFiles(folder, rank)
                    files.heartbeat.unlink(missing_ok=True)
                    files.dump.unlink(missing_ok=True)
            self._start = start = start._replace(ranks=tuple(sorted(self._error_files)))
            if self._launch.faults is not None:
                self._launch.faults.ranks_start(start.meeting, processes, start.num_ranks, self._num_active)
        if self._on_start is not None:
            self._on_start(start, why)

    def replica_leaves(self, ranks: range, exits: Mapping[int, int]) -> None:
        """See ``OnLeave``; other replicas go on."""
        why = self.cause({**exits}, ranks)
        with self._lock:
            for rank in ranks:
                self._files.pop(rank, None)
            self._stall = None
        if self._launch.on_leave is not None:
            self._launch.on_leave(ranks, why)

    def _rank_of(self, num_ranks: int, process: int) -> int:
        rank_of = self._launch.rank_of
        return process if rank_of is None else rank_of(num_ranks, process)

    def cause(self, exits: dict[int, int] | None, among: Sequence[int] | None = None) -> RanksError:
        """Reason for which the ranks have ended.

        Args:
            exits: Exit codes by torchrun's number of a process; None if unknown.
            among: Ranks that have ended; None for all.
        """
        with self._lock:
            if exits is not None and self._start is not None:
                num_ranks = self._start.num_ranks
                exits = {self._rank_of(num_ranks, process): code for process, code in exits.items()}
            if self._stall is not None:
                return RanksError(self._stall.sentence)
            beats, ranks = self._beats(), self._error_files if among is None else among
            return RankEnd(
                {rank: beats[rank] for rank in ranks if rank in beats},
                {rank: self._error_files[rank] for rank in ranks},
                {rank: self._logs[rank] for rank in ranks},
                exits,
                kernel_killed=num_kernel_kills() > self._kills,
                predicted_bytes=self._launch.predicted_bytes,
            ).cause()

    def poll(self) -> None:
        """Reports progress."""
        if self._on_poll is not None and self._start is not None:
            self._on_poll(self._beats())

    def end(self) -> None:
        """Ends the thread."""
        self._done.set()
        self.thread.join()

    def _beats(self) -> Beats:
        return {rank: read_beat(files.heartbeat) for rank, files in self._files.items()}

    def _run(self) -> None:
        try:
            while not self._done.wait(_POLL_S):
                with self._lock:
                    if self._start is not None:
                        self.poll()
                        self._note_the_end()
                        if self._launch.faults is not None:
                            self._launch.faults.poll(self._beats())
                        self._end_a_stall(len(self._start.ranks))
        except BaseException as error:
            self.raised = error
            self.agent.stop()

    def _note_the_end(self) -> None:
        if self._launch.max_restarts and self._ended_s is None:
            pids = [beat.pid for beat in self._beats().values() if beat is not None]
            if pids and not any(map(is_ours, pids)):
                self._ended_s = time.monotonic()

    def _end_a_stall(self, num_local_ranks: int) -> None:
        if self._stall is not None:
            rendezvous = self._launch.rendezvous
            if rendezvous is not None and time.monotonic() > self._stalled_s + _HEED_S:
                # the agent waits for a store that does not answer; Linux ends the ranks with this process
                sys.stderr.write(f"{self._stall.sentence}; the store at {rendezvous.nodes.endpoint} does not answer\n")
                sys.stderr.flush()
                os._exit(RunError.exit_code)
            return
        beats = self._beats()
        others = num_local_ranks < self._num_active
        stall = find_stall(beats, self._started_s, self._launch.timeout_s, others=others)
        if stall is None:
            return
        pids = [beat.pid for beat in beats.values() if beat is not None]
        if pids and not any(is_ours(pid) for pid in pids):
            return  # torchrun has ended them, and waits for other nodes
        stall = self._stopped(beats) or self._by_flight_recorder(beats) or stall
        beat = beats[stall.rank]
        if beat is None:
            raise RanksError(stall.sentence)
        if signal_ours(beat.pid, signal.SIGKILL):
            self._stall, self._stalled_s = stall, time.monotonic()

    def _stopped(self, beats: Beats) -> Stall | None:
        """The hang by a rank that somebody has stopped (SIGSTOP, a debugger), whatever it was waiting for then."""
        for rank, beat in beats.items():
            if beat is not None and is_ours(beat.pid) and status(beat.pid)[0] in ("T", "t"):
                sentence = f"rank {rank} was stopped by a signal, and made no progress for {self._launch.timeout_s:g} s"
                return Stall(rank, sentence)
        return None

    def _by_flight_recorder(self, beats: Beats) -> Stall | None:
        """The hang by the ranks' dumps, which have collectives on CUDA, on the CPU with TORCH_FR_BUFFER_SIZE."""
        dumps = {rank: files.dump for rank, files in self._files.items()}
        for beat in beats.values():
            if beat is not None:
                signal_ours(beat.pid, signal.SIGUSR1)
        end_s = time.monotonic() + _DUMP_S
        while time.monotonic() < end_s and not all(file.exists() for file in dumps.values()):
            time.sleep(_POLL_S)
        read = {rank: dump for rank, file in dumps.items() if (dump := read_dump(file)) is not None}
        late = late_in_collective(read)
        late = late_in_p2p(read, None if late is None else late.rank) or late  # a late rank may wait for its stage
        if late is None:
            return None
        return Stall(late.rank, f"no progress for {self._launch.timeout_s:g} s: {late.sentence}")


@contextmanager
def as_ranks(rendezvous: Rendezvous | None = None) -> Iterator[None]:
    """Gives this process the environment of ranks, which torch copies from it, for as long as they run."""
    previous = dict(os.environ)
    os.environ.update(rank_environment(rendezvous))
    try:
        yield
    finally:
        for name in set(os.environ) - set(previous):
            del os.environ[name]
        os.environ.update(previous)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Puts back the signal handlers that torch's agent replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    previous = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _LogFile(logging.FileHandler):
    """A log that ends where the disk is full, without a word: the run itself tells of a full disk."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, if the file can be opened."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Called where a record was not written; logging's own prints a traceback for each."""

    def close(self) -> None:
        """Closes the file, without what it has no space for."""
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(file: Path) -> Iterator[None]:
    """Sends the log of torch's agent to a file instead of stderr."""
    logger = logging.getLogger("torch.distributed")
    handler = _LogFile(file, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    propagates, logger.propagate = logger.propagate, False
    previous, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = propagates, previous
        handler.close()
