"""Heartbeats of the ranks of a node, and the rank that hangs.

A rank writes a record of 100 bytes into a memory-mapped file before and after every action. A record costs about a
microsecond and survives the death of the rank. FileTimerServer of torch ends every process that outlives a deadline
and cannot distinguish a rank that hangs from the ranks that wait for it. Heartbeats can on CPUs. On CUDA the host runs
ahead of the device: there the dumps of Flight Recorder name the rank that has not issued the collective in which the
other ranks wait.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import re
import struct
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

_RECORD = struct.Struct("<qdqq64s")  # pid, time, step, state, activity
_START_S = 300.0  # to import torch and build the model on a busy host, whatever silence is allowed later
_REMOTE_FACTOR = 1.5  # where other nodes have ranks, the node of the one that hangs ends it before this


class RankState(IntEnum):
    """State of a rank; ``WAITING`` is for another rank."""

    STARTING = 0
    RUNNING = 1
    WAITING = 2
    FINISHED = 3
    FAILED = 4


class Beat(NamedTuple):
    """Heartbeat of a rank.

    Attributes:
        time_s: Time on ``time.monotonic``'s clock, which all processes of a machine share.
        step: Finished steps.
        doing: Action that the rank runs or waits to start, or a phrase (``building the model``).
    """

    pid: int
    time_s: float
    step: int
    state: RankState
    doing: str


Beats = Mapping[int, Beat | None]
"""Last heartbeats of the ranks of one node, by global rank; None for a rank that has not started."""


class Heartbeat:
    """Writer of a rank's heartbeats.

    Args:
        path: The file, which is replaced.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._pid = os.getpid()
        self._step = 0
        self.beat(RankState.STARTING, "starting")

    def beat(self, state: RankState, doing: str, step: int | None = None) -> None:
        """Writes the record; None leaves the step as it was."""
        if step is not None:
            self._step = step
        # one copy: pack_into would clear the record first, and the launcher reads at any time
        self._memory[:] = _RECORD.pack(self._pid, time.monotonic(), self._step, state, doing.encode()[:64])


class Unwatched(Heartbeat):
    """Heartbeat of a rank without a launcher."""

    def __init__(self) -> None: ...

    def beat(self, state: RankState, doing: str, step: int | None = None) -> None:
        """Does nothing."""


def read_beat(path: Path) -> Beat | None:
    """Last heartbeat in the file; None when the rank has not written one yet."""
    try:
        pid, time_s, step, state, doing = _RECORD.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    if pid == 0:
        return None
    return Beat(pid, time_s, step, RankState(state), doing.rstrip(b"\0").decode(errors="replace"))


class Stall(NamedTuple):
    """A hang.

    Attributes:
        rank: Rank that stopped first.
        sentence: Description for the user.
    """

    rank: int
    sentence: str


def find_stall(beats: Beats, started_s: float, timeout_s: float, *, others: bool = False) -> Stall | None:
    """Finds a hang; None while there is none.

    A rank may wait longer than ``timeout_s`` for other ranks that still work. A hang is a silence of that length of a
    rank that does not wait, or of every rank that has not finished. Before its first step a rank may be silent for
    five minutes.

    Args:
        started_s: Start of the ranks.
        timeout_s: Longest allowed silence.
        others: Other nodes have ranks too: where all ranks here wait for those, their node acts first.
    """
    now_s = time.monotonic()

    def silent_s(beat: Beat | None) -> float:
        return now_s - (started_s if beat is None else max(started_s, beat.time_s))

    def waits(rank: int) -> bool:
        beat = beats[rank]
        return beat is not None and beat.state is RankState.WAITING

    def allowed_s(beat: Beat | None) -> float:
        starts = beat is None or (beat.step == 0 and beat.state is not RankState.WAITING and not is_action(beat.doing))
        return max(timeout_s, _START_S) if starts else timeout_s

    alive = [rank for rank, beat in beats.items() if beat is None or beat.state is not RankState.FINISHED]
    silent = [rank for rank in alive if silent_s(beats[rank]) > allowed_s(beats[rank])]
    if not silent or (len(silent) < len(alive) and all(waits(rank) for rank in silent)):
        return None
    # A rank that waits for a peer is a victim; of the others, the one silent longest stopped first.
    culprit = max(silent, key=lambda rank: (not waits(rank), silent_s(beats[rank])))
    rest = "".join(f"; rank {rank} was {_doing(beat)}" for rank, beat in beats.items() if rank != culprit)
    beat = beats[culprit]
    if beat is None:
        return Stall(culprit, f"rank {culprit} did not start within {allowed_s(beat):g} s{rest}")
    if waits(culprit):
        if others and silent_s(beat) < _REMOTE_FACTOR * timeout_s:
            return None
        here = " of this node" if others else ""
        return Stall(
            culprit, f"no rank{here} made progress for {timeout_s:g} s: rank {culprit} was {_doing(beat)}{rest}"
        )
    where = f"last action {beat.doing} of step {beat.step + 1}" if is_action(beat.doing) else beat.doing
    return Stall(culprit, f"rank {culprit} made no progress for {allowed_s(beat):g} s ({where}){rest}")


def is_action(doing: str) -> bool:
    """True for an action, False for a phrase."""
    return doing[:1].isdigit()


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "not started"
    if beat.state is RankState.WAITING and is_action(beat.doing):
        return f"waiting in {beat.doing}"
    return f"in {beat.doing}" if is_action(beat.doing) else beat.doing


class _BuiltinsUnpickler(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers, so that a file in the folder of a run cannot run code here."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses every class."""
        raise pickle.UnpicklingError(f"a dump has no {module}.{name}")


def read_dump(path: Path) -> Mapping[str, Any] | None:
    """Reads a rank's dump of torch's Flight Recorder (a pickled dict); None when there is none or half of one."""
    try:
        dump = _BuiltinsUnpickler(io.BytesIO(path.read_bytes())).load()
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return dump if isinstance(dump, dict) else None


def late_in_collective(dumps: Mapping[int, Mapping[str, Any]]) -> Stall | None:
    """Finds the rank that has not issued a collective in which other ranks wait, by Flight Recorder's dumps.

    Collectives of a process group have numbers, the same on all its ranks. Of a collective that some rank has issued
    and not completed, the rank of the group that has issued the fewest is late.

    Args:
        dumps: By global rank: ``entries`` with ``process_group``, ``collective_seq_id``, ``profiling_name`` and
            ``retired``, and ``pg_config`` with the ``ranks`` of every group.
    """
    last = {
        (rank, entry["process_group"][0]): entry
        for rank, dump in dumps.items()
        for entry in dump.get("entries", ())
        if not entry.get("is_p2p")
    }
    for (waiting, group), entry in sorted(last.items(), key=lambda item: int(item[1]["collective_seq_id"])):
        if entry.get("retired", entry.get("state") == "completed"):
            continue
        members = [rank for rank in _members(dumps[waiting], group) if rank in dumps]
        counts = {rank: last.get((rank, group), {"collective_seq_id": 0})["collective_seq_id"] for rank in members}
        late = min(members, key=lambda rank: counts[rank], default=waiting)
        number = entry["collective_seq_id"]
        if counts.get(late, number) < number:
            name = f"{entry['profiling_name']} number {number} of group {entry['process_group'][1] or group}"
            return Stall(late, f"rank {late} has not issued {name}, in which rank {waiting} waits")
    return None


def late_in_p2p(dumps: Mapping[int, Mapping[str, Any]], start: int | None = None) -> Stall | None:
    """Finds the rank for which others wait in a P2P send or receive, by Flight Recorder's dumps.

    The oldest transfer of a rank that has not completed names the peer for which it waits. That peer may wait for
    another one in turn; the last one, which waits in no transfer, has not issued its part.

    Args:
        dumps: See ``late_in_collective``; P2P entries have ``profiling_name`` such as ``nccl:recv 1<-0``, with the
            ranks within their group.
        start: Rank that holds others up in a collective; None to begin at any rank that waits in a transfer.
    """
    waits = {rank: pending for rank, dump in dumps.items() if (pending := _pending_transfer(dump)) is not None}
    at = next(iter(sorted(waits)), None) if start is None else start
    seen: list[int] = []
    while at in waits and at not in seen:
        seen.append(at)
        at = waits[at][0]
    if not seen or at is None or at in seen or at not in dumps:  # nobody waits, or all wait for each other
        return None
    waiting = seen[-1]
    return Stall(at, f"rank {at} has not issued its part of {waits[waiting][1]}, in which rank {waiting} waits")


_TRANSFER = re.compile(r"nccl:(send|recv) (\d+)(?:->|<-)(\d+)", re.ASCII)


def _pending_transfer(dump: Mapping[str, Any]) -> tuple[int, str] | None:
    """Peer and name of the oldest transfer of a rank that has not completed; None if there is none."""
    for entry in dump.get("entries", ()):
        transfer = _TRANSFER.fullmatch(str(entry.get("profiling_name")))
        if transfer is None or not entry.get("is_p2p") or entry.get("retired", entry.get("state") == "completed"):
            continue
        members = _members(dump, entry["process_group"][0])
        if int(transfer[3]) < len(members):
            return members[int(transfer[3])], transfer[0]
    return None


def _members(dump: Mapping[str, Any], group: str) -> Sequence[int]:
    groups = dump.get("pg_config", {}).values()
    ranks = next((str(config["ranks"]) for config in groups if config.get("name") in (group, "")), "[]")
    return list(map(int, json.loads(ranks)))
