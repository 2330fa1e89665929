"""Starts ranks with torchrun, watches them, and ends them all when one fails, hangs or the caller gives up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from executor.heartbeat import Beat, RankState, read_beat
from executor.processes import PARENT_VARIABLE, kill_sessions
from executor.rank import FIRST_RANK_VARIABLE, RankFiles
from executor.team import Failure, OtherNodeError, Team
from simplan.errors import RunError

__all__ = ["RanksError", "launch_ranks", "rank_environment", "start_agent"]

_POLL_S = 0.1
_CAUSE_S = 3.0  # after another node has failed, for a cause on this one to show
_GRACE_S = 5.0  # between asking torchrun to stop and killing everything
_SECONDARY = ("Connection closed by peer", "Connection reset by peer", "timed out", "NCCL")
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent

_KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
"""For glibc on CPU ranks: freed tensors stay with the process, as a caching allocator keeps them on a GPU. Without it
every large tensor is mapped and faulted in anew, so that a kernel's time depends on what was freed before it."""

Beats = tuple[Beat | None, ...]


class Agent(Protocol):
    """A process that has started the ranks and waits for them, in a session of its own (a subprocess.Popen)."""

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, once ``poll`` or ``wait`` has seen its end."""

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""

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

    Raises:
        RanksError: A rank raised, was killed, left early or hung; one sentence says which and why.
        RunError: Another node failed or was lost.
    """
    ours = range(num_ranks) if team is None else team.ranks
    log_file, failures = _node_files(out_dir, team)
    failures.unlink(missing_ok=True)
    files = [RankFiles(out_dir, rank) for rank in range(num_ranks)]
    for rank in ours:
        files[rank].remove()
    started_s = time.monotonic()
    agent = start_agent(failures, module, args, num_ranks, log_file, team)
    beats: Beats = ()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(_POLL_S)
            beats = tuple(read_beat(file.heartbeat) if rank in ours else None for rank, file in enumerate(files))
            if agent.returncode is None and team is not None:
                beats = _with_others(team, beats, agent)
            if on_poll is not None:
                on_poll(beats)
            if agent.returncode is not None:
                break
            stalled = _stalled(beats, started_s, timeout_s) if team is None or team.leads else None
            if stalled:
                raise RanksError(Failure(sentence=stalled))
    finally:
        _end(agent, [files[rank] for rank in ours])
    if agent.returncode != 0:
        raise RanksError(_why(failures, files, beats, log_file))


def _node_files(out_dir: Path, team: Team | None) -> tuple[Path, Path]:
    """The log of torchrun and its list of failed ranks; nodes may share a file system."""
    node = "" if team is None else f".node{team.node_rank}"
    return out_dir / f"torchrun{node}.log", out_dir / f"failures{node}.json"


def _with_others(team: Team, beats: Beats, agent: Agent) -> Beats:
    """The beats with those of other nodes. When one of these failed, ranks here get the time to say it was they."""
    try:
        return team.exchange(beats)
    except OtherNodeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(_CAUSE_S)
        if agent.poll():
            return beats
        raise


def start_agent(
    failures: Path, module: str, args: Sequence[str], num_ranks: int, log: Path, team: Team | None = None
) -> Agent:
    """Starts torchrun, which starts the ranks and waits for them.

    Args:
        failures: Gets a JSON list of ``{rank, exitcode}`` when ranks fail.
        module: Module that is one rank's program.
        args: Its command line.
        num_ranks: Ranks to start, of all nodes.
        log: Gets torchrun's output.
        team: The nodes; None for all ranks here.
    """
    torchrun = ["--nnodes=1", f"--nproc-per-node={num_ranks}", "--standalone", "--local-addr=127.0.0.1"]
    if team is not None:
        torchrun = team.torchrun_arguments()
    torchrun += ["--max-restarts=0", "-m", "executor.rank_main", module, *args]
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
    return {**_KEEP_FREED_MEMORY, **({} if team is None else team.environment()), **os.environ, **ours}


def _stalled(beats: Beats, started_s: float, timeout_s: float) -> str | None:
    """The sentence about a hang, or None while there is none.

    A rank may wait for longer than ``timeout_s`` on others that still work; it is a hang when a rank that does not
    wait, or every rank that has not finished, is silent for so long.
    """
    now_s = time.monotonic()

    def silent_s(beat: Beat | None) -> float:
        return now_s - (started_s if beat is None else beat.time_s)

    alive = [rank for rank, beat in enumerate(beats) if beat is None or beat.state is not RankState.FINISHED]

    def waits(rank: int) -> bool:
        beat = beats[rank]
        return beat is not None and beat.state is RankState.WAITING

    silent = [rank for rank in alive if silent_s(beats[rank]) > timeout_s]
    if not silent or (len(silent) < len(alive) and all(waits(rank) for rank in silent)):
        return None
    # Who waits for a message is a victim; of the others, the one silent longest stopped first.
    culprit = max(silent, key=lambda rank: (not waits(rank), silent_s(beats[rank])))
    others = "".join(f"; rank {rank} was {_doing(beats[rank])}" for rank in range(len(beats)) if rank != culprit)
    beat = beats[culprit]
    if beat is None:
        return f"rank {culprit} did not start within {timeout_s:g} s{others}"
    if waits(culprit):
        return f"no rank made progress for {timeout_s:g} s: rank {culprit} was {_doing(beat)}{others}"
    where = f"last action {beat.doing} of step {beat.step + 1}" if _is_action(beat.doing) else beat.doing
    return f"rank {culprit} made no progress for {timeout_s:g} s ({where}){others}"


def _is_action(doing: str) -> bool:
    return doing[:1].isdigit()


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "not started"
    if beat.state is RankState.WAITING and _is_action(beat.doing):
        return f"waiting in {beat.doing}"
    return f"in {beat.doing}" if _is_action(beat.doing) else beat.doing


def _end(agent: Agent, files: list[RankFiles]) -> None:
    """Ends torchrun and all ranks: asked first, killed after a grace period."""
    try:
        if agent.poll() is None:
            agent.terminate()
            agent.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when a second Ctrl-C cuts the grace period short
        beats = [beat for file in files if (beat := read_beat(file.heartbeat)) is not None]
        kill_sessions([agent.pid] if agent.poll() is None else [])
        kill_sessions(beat.pid for beat in beats)
        agent.wait()


def _why(failures: Path, files: list[RankFiles], beats: Beats, log_file: Path) -> Failure:
    """What to say about ranks that ended early: the first cause, not the ranks it pulled down.

    A signal comes first, except SIGTERM, which torchrun sends to the ranks that are left when one has failed. Errors
    about communication come after ranks that left without a word, whose peers raise them.
    """
    exits: dict[int, int] = {entry["rank"]: entry["exitcode"] for entry in _read_json(failures) or []}
    errors = {rank: error for rank, file in enumerate(files) if (error := _read_json(file.error)) is not None}

    def is_secondary(rank: int) -> bool:
        return any(text in errors[rank]["message"] for text in _SECONDARY)

    def killed(rank: int) -> str:
        return f"rank {rank} was killed by signal {-exits[rank]}{_at(beats[rank])}"

    def left(rank: int) -> str:
        return f"rank {rank} ended with exit code {exits[rank]}{_at(beats[rank])}; its output is in {files[rank].log}"

    def raised(rank: int) -> str:
        message = " ".join(str(errors[rank]["message"]).split())
        return (
            f"rank {rank} raised {errors[rank]['type']}: {message[:500]}{_at(beats[rank])}; "
            f"the traceback is in {files[rank].log}"
        )

    signalled = [rank for rank in sorted(exits) if exits[rank] < 0]
    terminated = [rank for rank in signalled if exits[rank] == -signal.SIGTERM]
    by_time = sorted(errors, key=lambda rank: float(errors[rank]["time_s"]))
    causes = (
        *(killed(rank) for rank in signalled if rank not in terminated),
        *(raised(rank) for rank in by_time if not is_secondary(rank)),
        *(left(rank) for rank in sorted(exits) if exits[rank] > 0 and rank not in errors),
    )
    consequences = (
        *(raised(rank) for rank in by_time if is_secondary(rank)),
        *(killed(rank) for rank in terminated),
        f"torchrun ended without having run the ranks; its output is in {log_file}",
    )
    return Failure(sentence=(causes or consequences)[0], consequence=not causes)


def _read_json(file: Path) -> Any:
    """None when there is no such file, or half of one: its writer may have been killed."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _at(beat: Beat | None) -> str:
    if beat is None or not _is_action(beat.doing):
        return ""
    return f" in {beat.doing} of step {beat.step + 1}"
