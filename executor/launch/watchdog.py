"""How the launcher sees what the ranks of its node do, and finds the one that hangs.

A rank writes a record of 100 bytes into a memory-mapped file before and after every action, which costs about a
microsecond and survives its death. torch's FileTimerServer ends whatever outlives a deadline; it cannot tell a rank
that hangs from the ranks that wait for it. Heartbeats can where the host computes. On CUDA the host runs ahead of the
device, so there Flight Recorder's dumps say which rank has not issued the collective that the others wait in.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Beat",
    "Beats",
    "Heartbeat",
    "RankState",
    "Stall",
    "Unwatched",
    "find_stall",
    "is_action",
    "late_in_collective",
    "read_beat",
    "read_dump",
]

_RECORD = struct.Struct("<qdqq64s")  # pid, time of the beat, step, state, what it does
_REMOTE_FACTOR = 1.5  # where other nodes have ranks, the node of the one that hangs ends it before this


class RankState(IntEnum):
    """What a rank is doing; ``WAITING`` is for another rank."""

    STARTING = 0
    RUNNING = 1
    WAITING = 2
    FINISHED = 3
    FAILED = 4


class Beat(NamedTuple):
    """The last sign of life of a rank.

    Attributes:
        pid: Its process.
        time_s: When it wrote this, on ``time.monotonic``'s clock (common to all processes of a machine).
        step: Steps it has finished.
        state: What it is doing.
        doing: The action it runs or waits to start, or a phrase (``building the model``).
    """

    pid: int
    time_s: float
    step: int
    state: RankState
    doing: str


Beats = Mapping[int, Beat | None]
"""By global rank, of the ranks of one node; None for a rank that has not started."""


class Heartbeat:
    """A rank's side of its record.

    Args:
        path: The file, made anew.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._pid = os.getpid()
        self._step = 0
        self.beat(RankState.STARTING, "starting")

    def beat(self, state: RankState, doing: str, step: int | None = None) -> None:
        """Writes the record; ``step`` stays as it was when not given."""
        if step is not None:
            self._step = step
        # one copy: pack_into would clear the record first, and the launcher reads at any time
        self._memory[:] = _RECORD.pack(self._pid, time.monotonic(), self._step, state, doing.encode()[:64])


class Unwatched(Heartbeat):
    """Of a rank that no launcher watches."""

    def __init__(self) -> None: ...

    def beat(self, state: RankState, doing: str, step: int | None = None) -> None:
        """Nobody looks."""


def read_beat(path: Path) -> Beat | None:
    """The record as it stands; None when the rank has not written one yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _RECORD.size:
        return None
    pid, time_s, step, state, doing = _RECORD.unpack(data)
    if pid == 0:
        return None
    return Beat(pid, time_s, step, RankState(state), doing.rstrip(b"\0").decode(errors="replace"))


class Stall(NamedTuple):
    """A hang.

    Attributes:
        rank: Who stopped first.
        sentence: For people.
    """

    rank: int
    sentence: str


def find_stall(beats: Beats, started_s: float, timeout_s: float, *, others: bool = False) -> Stall | None:
    """The hang, or None while there is none.

    A rank may wait for longer than ``timeout_s`` on others that still work; it is a hang when a rank that does not
    wait, or every rank that has not finished, is silent for so long.

    Args:
        beats: Last signs of life of this node's ranks.
        started_s: When they were started.
        timeout_s: The longest silence.
        others: Whether other nodes have ranks, too: where all ranks here wait for these, their node is to act first.
    """
    now_s = time.monotonic()

    def silent_s(beat: Beat | None) -> float:
        return now_s - (started_s if beat is None else max(started_s, beat.time_s))

    def waits(rank: int) -> bool:
        beat = beats[rank]
        return beat is not None and beat.state is RankState.WAITING

    alive = [rank for rank, beat in beats.items() if beat is None or beat.state is not RankState.FINISHED]
    silent = [rank for rank in alive if silent_s(beats[rank]) > timeout_s]
    if not silent or (len(silent) < len(alive) and all(waits(rank) for rank in silent)):
        return None
    # Who waits for a message is a victim; of the others, the one silent longest stopped first.
    culprit = max(silent, key=lambda rank: (not waits(rank), silent_s(beats[rank])))
    rest = "".join(f"; rank {rank} was {_doing(beat)}" for rank, beat in beats.items() if rank != culprit)
    beat = beats[culprit]
    if beat is None:
        return Stall(culprit, f"rank {culprit} did not start within {timeout_s:g} s{rest}")
    if waits(culprit):
        if others and silent_s(beat) < _REMOTE_FACTOR * timeout_s:
            return None
        here = " of this node" if others else ""
        return Stall(
            culprit, f"no rank{here} made progress for {timeout_s:g} s: rank {culprit} was {_doing(beat)}{rest}"
        )
    where = f"last action {beat.doing} of step {beat.step + 1}" if is_action(beat.doing) else beat.doing
    return Stall(culprit, f"rank {culprit} made no progress for {timeout_s:g} s ({where}){rest}")


def is_action(doing: str) -> bool:
    """Whether a rank is inside of a step."""
    return doing[:1].isdigit()


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "not started"
    if beat.state is RankState.WAITING and is_action(beat.doing):
        return f"waiting in {beat.doing}"
    return f"in {beat.doing}" if is_action(beat.doing) else beat.doing


def read_dump(path: Path) -> Mapping[str, Any] | None:
    """A rank's dump of torch's Flight Recorder (a pickled dict); None when there is none or half of one."""
    try:
        found = pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return found if isinstance(found, dict) else None


def late_in_collective(dumps: Mapping[int, Mapping[str, Any]]) -> Stall | None:
    """The rank that others wait for in a collective that it has not issued, by Flight Recorder's dumps.

    Collectives of a process group have numbers, the same on all its ranks. Of a collective that some rank has issued
    and not completed, the rank of the group that has issued the fewest is late.

    Args:
        dumps: By global rank: ``entries`` with ``process_group``, ``collective_seq_id``, ``profiling_name`` and
            ``retired``, and ``pg_config`` with the ``ranks`` of every group.
    """
    issued = {
        rank: {entry["process_group"][0]: entry for entry in dump.get("entries", ()) if not entry.get("is_p2p")}
        for rank, dump in dumps.items()
    }
    pending = [
        (entry["collective_seq_id"], group, rank, entry)
        for rank, of_groups in issued.items()
        for group, entry in of_groups.items()
        if not entry.get("retired", entry.get("state") == "completed")
    ]
    for number, group, waiting, entry in sorted(pending, key=lambda found: found[0]):
        counts = {
            rank: of_groups[group]["collective_seq_id"] if group in of_groups else 0
            for rank, of_groups in issued.items()
            if rank in _members(dumps[waiting], group)
        }
        late = min(counts, key=lambda rank: counts[rank], default=waiting)
        if counts.get(late, number) < number:
            name = f"{entry['profiling_name']} number {number} of group {entry['process_group'][1] or group}"
            return Stall(late, f"rank {late} has not issued {name}, in which rank {waiting} waits")
    return None


def _members(dump: Mapping[str, Any], group: str) -> Sequence[int]:
    config = dump.get("pg_config", {})
    found = next((c for c in config.values() if c.get("name") in (group, "")), None)
    ranks = str(found["ranks"]).strip("[]") if found else ""
    return [int(rank) for rank in ranks.split(",") if rank.strip()]
