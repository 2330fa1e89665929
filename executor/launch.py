"""Starts ranks with torchrun, watches them, and ends them all when one fails, hangs or the caller gives up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from executor.attempts import Attempts
from executor.departure import Departure, LeftError
from executor.exchange import Beats, Heard, LostNodeError, OtherNodeError, RegroupError
from executor.failure import Failure
from executor.heartbeat import Beat, RankState, read_beat
from executor.processes import PARENT_VARIABLE, kill_sessions
from executor.rank import FIRST_ATTEMPT_VARIABLE, FIRST_RANK_VARIABLE, TEAM_VARIABLE, RankFiles
from executor.stalls import find_stall
from executor.stopping import stop_file
from executor.team import Team
from simplan.children import ask_to_end, exit_code
from simplan.errors import RunError

__all__ = ["RanksError", "launch_ranks", "rank_environment", "start_agent"]

_POLL_S = 0.1
_CAUSE_S = 3.0  # after another node has failed, for a cause on this one to show
_GRACE_S = 5.0  # between asking torchrun to stop and killing everything
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent

_KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
"""For glibc on CPU ranks: freed tensors stay with the process, as a caching allocator keeps them on a GPU. Without it
every large tensor is mapped and faulted in anew, so that a kernel's time depends on what was freed before it."""


class Agent(Protocol):
    """A process that has started the ranks and waits for them, in a session of its own (a subprocess.Popen)."""

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, once ``poll`` or ``wait`` has seen its end."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; subprocess.TimeoutExpired after ``timeout`` seconds."""

    def terminate(self) -> None:
        """Asks it to end."""


class RanksError(RunError):
    """Ranks of this node failed.

    Attributes:
        consequence: It may be the consequence of what happened on another node.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.consequence = failure.consequence


def launch_ranks(
    module: str,
    args: Sequence[str],
    *,
    num_ranks: int,
    out_dir: Path,
    timeout_s: float,
    on_poll: Callable[[Beats], None] | None = None,
    team: Team | None = None,
    max_restarts: int = 0,
    on_restart: Callable[[str], None] | None = None,
    predicted_bytes: Sequence[int] = (),
    departure: Departure | None = None,
) -> None:
    """Runs ``python -m MODULE ARGS`` as ranks on this machine until all have finished.

    The module's main calls ``executor.rank.live_as_rank(out_dir, body)``. Whatever happens, no process is left behind:
    also when this function is left by KeyboardInterrupt or SystemExit, and on Linux also when this process is killed.

    Args:
        module: Module that is one rank's program.
        args: Its command line.
        num_ranks: Ranks of the run.
        out_dir: Folder of the run, which exists; gets the ranks' logs and heartbeats.
        timeout_s: A rank without a sign of life for so long ends the run.
        on_poll: Called a few times per second with the last beat of every rank; None for one not heard of.
        team: The other nodes of the run, of whose ranks this machine has its part; None for all ranks here.
        max_restarts: How often all ranks are started again when some failed or hang, or a node was lost.
        on_restart: Called with why, each time.
        predicted_bytes: By rank, what it was predicted to need on its device; for saying so when it was too much.
        departure: Whether this node is told to leave the team; None where nobody tells it so.

    Raises:
        RanksError: A rank raised, was killed, left early or hung; one sentence says which and why.
        RegroupError: A node was lost, has left or is to be let in, and others than these are to go on.
        LeftError: This node has left.
        SystemExit: It was to leave, and is node 0.
        RunError: Another node failed or was lost.
    """
    ours = range(num_ranks) if team is None else team.ranks
    log_file, failures = _node_files(out_dir, team)
    failures.unlink(missing_ok=True)
    stop = stop_file(out_dir, ours.start)
    stop.unlink(missing_ok=True)
    files = [RankFiles(out_dir, rank) for rank in range(num_ranks)]
    for rank in ours:
        files[rank].remove()
    agent = start_agent(failures, module, args, num_ranks, log_file, team, max_restarts)
    attempts = Attempts(failures, files, log_file, team, max_restarts, on_restart, predicted_bytes)
    beats: Beats = ()
    others: Sequence[Sequence[Failure]] = ()
    regroups = stopped = False
    try:
        while True:
            exit_code(agent, _POLL_S)
            beats = tuple(read_beat(file.heartbeat) if rank in ours else None for rank, file in enumerate(files))
            attempts.look(beats)
            stopped = _have_stopped([beats[rank] for rank in ours])
            if team is not None and (agent.returncode is None or stopped):
                heard = _exchange(team, beats, attempts, agent, timeout_s)
                attempts.heed(heard)
                beats, others = heard.beats, heard.ended
                if heard.can_grow or (departure is not None and departure.is_told):
                    stop.touch()
            attempts.tell(others)
            beats = attempts.beats_of_this(beats)
            if on_poll is not None:
                on_poll(beats)
            if departure is not None and team is not None and _leaves(departure, agent, stopped=stopped):
                _leave(team, beats if stopped else ())
            if stopped and (team is None or team.leads):
                raise RegroupError("other nodes are to go on")
            if stopped:  # until node 0 says who goes on, or why nobody does
                time.sleep(_POLL_S)
                continue
            if agent.returncode is not None:
                break
            stall = find_stall(beats, attempts.started_s, timeout_s) if team is None or team.leads else None
            if stall is not None and not attempts.end(stall, beats):
                raise RanksError(attempts.stalled(stall))
    except RegroupError as error:
        if departure is not None and departure.is_told and team is not None:
            _leave(team, beats if stopped else ())
        if error.is_restart and attempts.num_restarts >= max_restarts:
            raise LostNodeError(str(error)) from None
        error.num_restarts, regroups = attempts.num_restarts, True
        raise
    finally:
        _end(agent, [files[rank] for rank in ours])
        if not regroups:  # what failed besides is a consequence
            attempts.tell(others, last=True)
    if agent.returncode != 0:
        raise RanksError(attempts.failure(beats))


def _node_files(out_dir: Path, team: Team | None) -> tuple[Path, Path]:
    """The log of torchrun and its list of failed ranks; nodes may share a file system."""
    node = "" if team is None else f".node{team.node_rank}"
    return out_dir / f"torchrun{node}.log", out_dir / f"failures{node}.json"


def _exchange(team: Team, beats: Beats, attempts: Attempts, agent: Agent, timeout_s: float) -> Heard:
    """With other nodes. When one of these has ended the run, ranks here get the time to say it was they."""
    try:
        return team.exchange.turn(beats, attempts.ended, timeout_s)
    except OtherNodeError:
        if exit_code(agent, _CAUSE_S):
            return Heard(beats, (), None)
        raise


def _have_stopped(beats: Sequence[Beat | None]) -> bool:
    return all(beat is not None and beat.state is RankState.STOPPED for beat in beats)


def _leaves(departure: Departure, agent: Agent, *, stopped: bool) -> bool:
    """Whether a node that is to leave has nothing more to wait for."""
    return departure.is_told and (stopped or departure.is_due or agent.returncode not in (None, 0))


def _leave(team: Team, stopped: Beats) -> NoReturn:
    """Leaves the team; node 0 by ending the run.

    Args:
        team: The nodes.
        stopped: Last beats of ranks that have stopped at a checkpoint; empty when they have not.
    """
    if team.leads:
        raise SystemExit(LeftError.exit_code)
    team.leave()
    step = max((beat.step for beat in stopped if beat is not None), default=None)
    after = "the newest checkpoint" if step is None else f"step {step}, of which there is a checkpoint"
    raise LeftError(f"{team.me} has left the run, as it was told to; the others can go on after {after}")


def start_agent(
    failures: Path,
    module: str,
    args: Sequence[str],
    num_ranks: int,
    log: Path,
    team: Team | None = None,
    max_restarts: int = 0,
) -> Agent:
    """Starts torchrun, which starts the ranks and waits for them.

    Args:
        failures: Gets a line when ranks fail: a JSON list of ``{rank, exitcode}``.
        module: Module that is one rank's program.
        args: Its command line.
        num_ranks: Ranks to start, of all nodes.
        log: Gets torchrun's output.
        team: The nodes; None for all ranks here.
        max_restarts: As of ``launch_ranks``.
    """
    torchrun = ["--nnodes=1", f"--nproc-per-node={num_ranks}", "--standalone", "--local-addr=127.0.0.1"]
    if team is not None:
        torchrun = team.torchrun_arguments()
    left = max_restarts - (0 if team is None else team.first_attempt)
    torchrun += [f"--max-restarts={left}", "-m", "executor.rank_main", module, *args]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "executor.agent", str(failures), *torchrun],
            env=rank_environment(team),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def rank_environment(team: Team | None = None) -> dict[str, str]:
    """Children import the same packages as we do, and nothing from the folder they happen to start in."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    # torchrun would set and announce one thread per rank; the ranks set their own number.
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())}
    ours[FIRST_RANK_VARIABLE] = str(0 if team is None else team.ranks.start)
    ours[FIRST_ATTEMPT_VARIABLE] = str(0 if team is None else team.first_attempt)
    ours[TEAM_VARIABLE] = str(0 if team is None else team.number)
    return {**_KEEP_FREED_MEMORY, **({} if team is None else team.environment()), **os.environ, **ours}


def _end(agent: Agent, files: list[RankFiles]) -> None:
    """Ends torchrun and all ranks: asked first, killed after a grace period."""
    try:
        if exit_code(agent, 0.0) is None:
            ask_to_end(agent)
            exit_code(agent, _GRACE_S)
    finally:  # also when a second Ctrl-C cuts the grace period short
        beats = [beat for file in files if (beat := read_beat(file.heartbeat)) is not None]
        kill_sessions([agent.pid] if exit_code(agent, 0.0) is None else [])
        kill_sessions(beat.pid for beat in beats)
        exit_code(agent)
