"""Why ranks ended early: the first cause, not the ranks it pulled down."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from executor.launch.out_of_memory import RankOutOfMemoryError, predicted_peak
from executor.launch.rank import unfinished_error_file
from executor.launch.watchdog import Beat, Beats, RankState, is_action
from simplan.errors import RunError
from simplan.program.action import Action

__all__ = ["RankEnd", "RanksError"]

_SECONDARY = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "timed out",
    "NCCL",
    "PeerStopped",
)


class RanksError(RunError):
    """Ranks of this node failed.

    Attributes:
        is_consequence: It may be the consequence of what happened on another node.
    """

    def __init__(self, sentence: str, *, is_consequence: bool = False) -> None:
        super().__init__(sentence)
        self.is_consequence = is_consequence


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What is left of the ranks of a node that have ended.

    Attributes:
        beats: Last signs of life.
        error_files, logs: torchrun's, by global rank.
        exits: Exit codes of those that failed, a negative one being a signal; None where torchrun does not tell them:
            before a restart.
        kernel_killed: The kernel has killed processes of this host for want of memory since the ranks were started.
        predicted_bytes: By rank, what it was predicted to need; empty without a prediction.
    """

    beats: Beats
    error_files: Mapping[int, Path]
    logs: Mapping[int, Path]
    exits: Mapping[int, int] | None = None
    kernel_killed: bool = False
    predicted_bytes: tuple[int, ...] = ()
    _errors: dict[int, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads the error files: when each was written and what it says."""
        for rank, file in self.error_files.items():
            try:
                message = json.loads(file.read_text())["message"]
            except (OSError, ValueError, KeyError):
                continue
            text = message if isinstance(message, str) else str(message.get("message"))
            self._errors[rank] = (file.stat().st_mtime, text)

    def cause(self) -> RanksError:
        """What to say.

        A signal comes first, except SIGTERM, which torchrun sends to the ranks that are left when one has failed.
        Errors about communication come after ranks that left without a word, whose peers raise them.
        """
        exits = self._silent() if self.exits is None else self.exits
        told = (-signal.SIGTERM, 128 + signal.SIGTERM)
        # also who was ended while it wrote its error: it had one because of others, who came first
        terminated = [rank for rank in sorted(exits) if exits[rank] in told or self._was_writing(rank)]
        signalled = [rank for rank in sorted(exits) if exits[rank] < 0]
        by_time = sorted(self._errors, key=lambda rank: self._errors[rank][0])
        consequences = [rank for rank in by_time if any(text in self._errors[rank][1] for text in _SECONDARY)]
        causes = (
            *(self._killed(rank, exits[rank]) for rank in signalled if rank not in terminated),
            *(self._raised(rank) for rank in by_time if rank not in consequences),
            *(
                self._left(rank, exits[rank])
                for rank in sorted(exits)
                if exits[rank] > 0 and rank not in {*self._errors, *terminated}
            ),
        )
        if causes:
            return RanksError(causes[0])
        others = (
            *(self._raised(rank) for rank in consequences),
            *(f"rank {rank} was told to end{_at(self.beats.get(rank))}" for rank in terminated),
            f"torchrun ended without having run the ranks; their output is in {next(iter(self.logs.values()), '-')}",
        )
        return RanksError(others[0], is_consequence=True)

    def _was_writing(self, rank: int) -> bool:
        beat = self.beats.get(rank)
        could_write = beat is None or beat.state is not RankState.FAILED
        return could_write and rank not in self._errors and unfinished_error_file(self.error_files[rank]).is_file()

    def _silent(self) -> dict[int, int]:
        """Before a restart: ranks that left no error were killed, unless torchrun has asked them to end."""
        return {
            rank: -signal.SIGKILL
            for rank, beat in self.beats.items()
            if rank not in self._errors and not (beat is not None and beat.state is RankState.FINISHED)
        }

    def _killed(self, rank: int, exit_code: int) -> str:
        predicted = self.predicted_bytes[rank] if self.predicted_bytes else None
        by_kernel = self.kernel_killed and exit_code == -signal.SIGKILL
        by_whom = f", by the kernel for want of memory; {predicted_peak(predicted)}" if by_kernel else ""
        number = "" if self.exits is None else f" by signal {-exit_code}"
        return f"rank {rank} was killed{number}{_at(self.beats.get(rank))}{by_whom}"

    def _left(self, rank: int, exit_code: int) -> str:
        beat = self.beats.get(rank)
        if beat is not None and beat.state is RankState.FAILED:  # it could not write more than this
            return f"rank {rank} ended: {beat.doing}"
        return f"rank {rank} ended with exit code {exit_code}{_at(beat)}; its output is in {self.logs[rank]}"

    def _raised(self, rank: int) -> str:
        text = " ".join(self._errors[rank][1].split())
        kind, _, message = text.partition(": ")
        beat, trace = self.beats.get(rank), f"the traceback is in {self.logs[rank]}"
        if kind == RankOutOfMemoryError.__name__:
            return f"rank {rank} ran out of memory {_during(beat)}: {message}; {trace}"
        return f"rank {rank} raised {kind}: {message[:500]}{_at(beat)}; {trace}"


def _at(beat: Beat | None) -> str:
    if beat is None or not is_action(beat.doing):
        return ""
    return f" in {beat.doing} of step {beat.step + 1}"


def _during(beat: Beat | None) -> str:
    """Where it was, in words for those who do not know the letters of actions."""
    if beat is None:
        return "before it had started"
    if not is_action(beat.doing):
        return f"while {beat.doing}"
    return f"in the {Action.parse(beat.doing).in_words()} ({beat.doing} of step {beat.step + 1})"
