"""Runs ranks with torchrun's elastic agent in this process, and watches those of this node.

The agent has the main thread; a second one reads heartbeats, tells how far the run is and kills a rank that hangs,
which the agent then takes for a failed one. Whatever happens, no process is left behind: the agent ends the ranks, and
Linux does when this process is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from executor.launch.errors import RankEnd, RanksError
from executor.launch.nodes import Rendezvous
from executor.launch.rank import PARENT_VARIABLE, RankFiles, num_kernel_kills
from executor.launch.watchdog import Beats, Stall, find_stall, late_in_collective, read_beat, read_dump
from simplan.errors import RunError

__all__ = ["Agent", "Launch", "Start", "Torchrun", "launch_ranks", "rank_environment"]

_POLL_S = 0.1
_DUMP_S = 2.0  # for Flight Recorder's dumps
_HEED_S = 30.0  # for torchrun to see that a rank was killed
_SHUTDOWN_S = 20  # a rank that is told to stop takes 15 s at most
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent.parent

_RANK_ENVIRONMENT = {
    # For glibc on CPU ranks: freed tensors stay with the process, as a caching allocator keeps them on a GPU. Without
    # it every large tensor is mapped and faulted in anew, so that a kernel's time depends on what was freed before it.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


class Start(NamedTuple):
    """The agent starts ranks, for the first time or again.

    Attributes:
        ranks: Global ranks of this node.
        num_ranks: Of all nodes: WORLD_SIZE.
        restarts: How often ranks that failed have been started again.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be run.

    Attributes:
        module: Module that is one rank's program; its main calls ``executor.launch.rank.live_as_rank``.
        args: Its command line.
        num_ranks: Ranks on this node.
        out_dir: Folder of the run, which exists; gets torchrun's log folder.
        timeout_s: A rank without a sign of life for so long hangs.
        rendezvous: With the other nodes; None for this machine alone.
        max_restarts: How often ranks are started again when some failed or hang.
        folder_of: Where the files of ranks are, by WORLD_SIZE.
        num_active: How many ranks of WORLD_SIZE have work; the others are idle.
        predicted_bytes: By rank, what it was predicted to need on its device; for saying so when it was too much.
    """

    module: str
    args: tuple[str, ...]
    num_ranks: int
    out_dir: Path
    timeout_s: float
    rendezvous: Rendezvous | None = None
    max_restarts: int = 0
    folder_of: Callable[[int], Path] | None = None
    num_active: Callable[[int], int] = lambda num_ranks: num_ranks
    predicted_bytes: tuple[int, ...] = ()

    def files(self, rank: int, num_ranks: int) -> RankFiles:
        """Of one of so many ranks."""
        return RankFiles(self.out_dir if self.folder_of is None else self.folder_of(num_ranks), rank)


OnStart = Callable[[Start, RunError | None], None]
"""Called when ranks are started, with why those before them have ended; None at first and where nodes came or left."""


class Logs(DefaultLogsSpecs):
    """torchrun's log folders; it asks for them whenever it starts ranks.

    Args:
        log_dir: The folder.
        before, after: Called before folders are made, and with them.
    """

    def __init__(self, log_dir: Path, before: Callable[[], None], after: Callable[[Start, LogsDest], None]) -> None:
        super().__init__(str(log_dir), redirects=Std.ALL)
        self._before, self._after = before, after

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """As torch's."""
        self._before()
        made = super().reify(envs)
        first = envs[0]
        ranks = tuple(int(env["RANK"]) for env in envs.values())
        self._after(Start(ranks, int(first["WORLD_SIZE"]), int(first["TORCHELASTIC_RESTART_COUNT"])), made)
        return made


class Agent:
    """What starts ranks and waits for them, in the main thread: torchrun's, as ``torchrun`` itself runs it."""

    def run(self, launch: Launch, logs: Logs) -> None:
        """Returns when all ranks have finished.

        Raises:
            ChildFailedError: Ranks of this node failed, and no restart is left.
            SignalException: ``stop`` was called, or this process got a signal; ranks have ended.
            RendezvousError: The other nodes did not come.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Has ``run`` end the ranks and raise; called from another thread."""
        raise NotImplementedError

    def abandon(self, error: RunError) -> NoReturn:
        """Ends this process and its ranks at once: ``run`` waits for a store that does not answer."""
        raise NotImplementedError


class Torchrun(Agent):
    """torchrun's elastic agent."""

    def run(self, launch: Launch, logs: Logs) -> None:
        """As said."""
        rendezvous = launch.rendezvous
        nodes = None if rendezvous is None else rendezvous.nodes
        os.environ.update(rank_environment(rendezvous))
        config = LaunchConfig(
            min_nodes=1 if nodes is None else nodes.min_nodes,
            max_nodes=1 if nodes is None else nodes.max_nodes,
            nproc_per_node=launch.num_ranks,
            run_id="simplan",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0" if nodes is None else nodes.endpoint,
            rdzv_configs={} if rendezvous is None else rendezvous.torchrun_settings(),
            local_addr="127.0.0.1" if rendezvous is None else rendezvous.address,
            max_restarts=launch.max_restarts,
            logs_specs=logs,
            shutdown_timeout=_SHUTDOWN_S,
        )
        arguments = ["-u", "-m", "executor.launch.rank", launch.module, *launch.args]
        with _handlers_restored(), _logging_to(launch.out_dir / "logs" / "torchrun.log"):
            launch_agent(config, sys.executable, arguments)

    def stop(self) -> None:
        """As said."""
        os.kill(os.getpid(), signal.SIGTERM)

    def abandon(self, error: RunError) -> NoReturn:
        """As said; Linux ends the ranks with this process."""
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)


make_agent: Callable[[], Agent] = Torchrun
"""Tests put ranks here that are forked."""


def rank_environment(rendezvous: Rendezvous | None = None) -> dict[str, str]:
    """Ranks import the same packages as we do, and nothing from the folder they happen to start in."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    # torchrun would set and announce one thread per rank; the ranks set their own number.
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())}
    if rendezvous is not None:
        # With the agents' store, ranks would look for rank 0 of the first round, which may have left.
        ours |= {**rendezvous.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**_RANK_ENVIRONMENT, **os.environ, **ours}


def launch_ranks(
    launch: Launch, on_poll: Callable[[Beats], None] | None = None, on_start: OnStart | None = None
) -> None:
    """Runs this node's ranks until all have finished.

    Args:
        launch: What is run.
        on_poll: Called a few times per second with the last beat of every rank of this node; what it raises ends the
            run and is raised here.
        on_start: Called whenever ranks are started.

    Raises:
        RanksError: A rank raised, was killed, left early or hung; one sentence says which and why.
        RunError: The other nodes did not come.
        KeyboardInterrupt, SystemExit: This process got SIGINT or SIGTERM; ranks had the time for a checkpoint.
    """
    agent = make_agent()
    watch = _Watch(launch, agent, on_poll, on_start)
    logs = Logs(launch.out_dir / "logs", watch.look_back, watch.ranks_start)
    watch.thread.start()
    try:
        agent.run(launch, logs)
    except ChildFailedError as failed:
        watch.poll()
        raise watch.cause({rank: failure.exitcode for rank, failure in failed.failures.items()}) from None
    except SignalException as error:
        watch.done.set()
        watch.thread.join()
        if watch.raised is not None:
            raise watch.raised from None
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + int(error.sigval)) from None
    except RendezvousTimeoutError:
        raise RunError(_too_few(launch)) from None
    except RendezvousClosedError:
        raise RanksError("the run has ended on the other nodes", is_consequence=True) from None
    except (RendezvousConnectionError, RendezvousStateError) as error:
        at = launch.rendezvous.nodes.endpoint if launch.rendezvous else "this machine"
        raise RanksError(f"the store of the run at {at} cannot be reached: {error}", is_consequence=True) from None
    finally:
        watch.done.set()
        watch.thread.join()
    if watch.raised is not None:
        raise watch.raised
    watch.poll()  # how far it came at last


def _too_few(launch: Launch) -> str:
    assert launch.rendezvous is not None
    nodes = launch.rendezvous.nodes
    least = nodes.min_nodes if nodes.min_nodes == nodes.max_nodes else f"at least {nodes.min_nodes}"
    return f"{least} nodes did not meet at {nodes.endpoint} within {nodes.join_timeout_s:g} s"


@dataclass(slots=True)
class _Watch:
    """The second thread, and what it knows about the ranks that run."""

    launch: Launch
    agent: Agent
    on_poll: Callable[[Beats], None] | None
    on_start: OnStart | None
    done: threading.Event = field(default_factory=threading.Event)
    raised: BaseException | None = None
    start: Start | None = None
    _started_s: float = 0.0
    _kills: int = 0
    _stall: Stall | None = None
    _stalled_s: float = 0.0
    _before: RanksError | None = None
    _error_files: dict[int, Path] = field(default_factory=dict)
    _logs: dict[int, Path] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Makes the thread."""
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def look_back(self) -> None:
        """Ranks are about to be started: why those before them have ended."""
        self._before = None if self.start is None else self.cause(None)

    def ranks_start(self, start: Start, logs: LogsDest) -> None:
        """They are started now."""
        before, launch = self.start, self.launch
        with self._lock:
            failed = before is not None and start.restarts > before.restarts
            self.start, self._stall = start, None
            self._started_s, self._kills = time.monotonic(), num_kernel_kills()
            local = dict(enumerate(start.ranks))
            self._error_files = {rank: Path(logs.error_files[k]) for k, rank in local.items()}
            self._logs = {rank: Path(logs.stderrs[k]) for k, rank in local.items()}
            for rank in start.ranks:
                files = launch.files(rank, start.num_ranks)
                files.heartbeat.unlink(missing_ok=True)
                files.dump.unlink(missing_ok=True)
        if self.on_start is not None:
            self.on_start(start, self._before if failed else None)

    def cause(self, exits: dict[int, int] | None) -> RanksError:
        """Why the ranks have ended."""
        with self._lock:
            if self._stall is not None:
                return RanksError(self._stall.sentence)
            return RankEnd(
                self._beats(),
                self._error_files,
                self._logs,
                exits,
                kernel_killed=num_kernel_kills() > self._kills,
                predicted_bytes=self.launch.predicted_bytes,
            ).cause()

    def poll(self) -> None:
        """Tells how far the ranks are."""
        if self.on_poll is not None and self.start is not None:
            self.on_poll(self._beats())

    def _beats(self) -> Beats:
        start = self.start
        if start is None:
            return {}
        active = self.launch.num_active(start.num_ranks)
        return {
            rank: read_beat(self.launch.files(rank, start.num_ranks).heartbeat) for rank in start.ranks if rank < active
        }

    def _run(self) -> None:
        try:
            while not self.done.wait(_POLL_S):
                with self._lock:
                    if self.start is not None:
                        self.poll()
                        self._end_a_stall(self.start)
        except BaseException as error:
            self.raised = error
            self.agent.stop()

    def _end_a_stall(self, start: Start) -> None:
        if self._stall is not None:
            rendezvous = self.launch.rendezvous
            if rendezvous is not None and time.monotonic() > self._stalled_s + _HEED_S:
                at = rendezvous.nodes.endpoint
                self.agent.abandon(RunError(f"{self._stall.sentence}; the store at {at} does not answer"))
            return
        beats = self._beats()
        others = len(start.ranks) < self.launch.num_active(start.num_ranks)
        stall = find_stall(beats, self._started_s, self.launch.timeout_s, others=others)
        if stall is None:
            return
        pids = [beat.pid for beat in beats.values() if beat is not None]
        if pids and not any(_is_there(pid) for pid in pids):
            return  # torchrun has ended them, and waits for other nodes
        stall = self._by_flight_recorder(start, beats) or stall
        beat = beats[stall.rank]
        if beat is None:
            raise RanksError(stall.sentence)
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGKILL)
            self._stall, self._stalled_s = stall, time.monotonic()

    def _by_flight_recorder(self, start: Start, beats: Beats) -> Stall | None:
        """What the ranks' dumps say, where they record collectives: always on CUDA, else with TORCH_FR_BUFFER_SIZE."""
        files = {rank: self.launch.files(rank, start.num_ranks) for rank in beats}
        for beat in beats.values():
            if beat is not None:
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGUSR1)
        end_s = time.monotonic() + _DUMP_S
        while time.monotonic() < end_s and not all(of_rank.dump.exists() for of_rank in files.values()):
            time.sleep(_POLL_S)
        dumps = {rank: dump for rank, of_rank in files.items() if (dump := read_dump(of_rank.dump)) is not None}
        late = late_in_collective(dumps)
        if late is None:
            return None
        return Stall(late.rank, f"no progress for {self.launch.timeout_s:g} s: {late.sentence}")


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Torch's agent takes over handlers of signals, and keeps them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    previous = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """What torch's agent logs is none of our messages."""
    logger = logging.getLogger("torch.distributed")
    handler = logging.FileHandler(file, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    propagates, logger.propagate = logger.propagate, False
    previous, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = propagates, previous
        handler.close()
