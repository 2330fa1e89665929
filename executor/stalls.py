"""Ranks that hang: who stopped first, and what the others were doing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from executor.heartbeat import Beat, RankState

__all__ = ["Stall", "find_stall", "is_action"]


class Stall(NamedTuple):
    """A hang.

    Attributes:
        rank: Who stopped first.
        sentence: For people.
    """

    rank: int
    sentence: str


def find_stall(beats: Sequence[Beat | None], started_s: float, timeout_s: float) -> Stall | None:
    """The hang, or None while there is none.

    A rank may wait for longer than ``timeout_s`` on others that still work; it is a hang when a rank that does not
    wait, or every rank that has not finished, is silent for so long.

    Args:
        beats: Last signs of life; None for ranks that have not started.
        started_s: When they were started.
        timeout_s: The longest silence.
    """
    now_s = time.monotonic()

    def silent_s(beat: Beat | None) -> float:
        return now_s - (started_s if beat is None else beat.time_s)

    ended = (RankState.FINISHED, RankState.STOPPED)
    alive = [rank for rank, beat in enumerate(beats) if beat is None or beat.state not in ended]

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
        return Stall(culprit, f"rank {culprit} did not start within {timeout_s:g} s{others}")
    if waits(culprit):
        return Stall(culprit, f"no rank made progress for {timeout_s:g} s: rank {culprit} was {_doing(beat)}{others}")
    where = f"last action {beat.doing} of step {beat.step + 1}" if is_action(beat.doing) else beat.doing
    return Stall(culprit, f"rank {culprit} made no progress for {timeout_s:g} s ({where}){others}")


def is_action(doing: str) -> bool:
    """Whether a rank is inside of a step."""
    return doing[:1].isdigit()


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "not started"
    if beat.state is RankState.WAITING and is_action(beat.doing):
        return f"waiting in {beat.doing}"
    return f"in {beat.doing}" if is_action(beat.doing) else beat.doing
