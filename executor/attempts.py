"""The attempts to run the ranks of a job: which is going on, why those before it ended, how one that hangs is ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from executor.causes import cause_of, read_exits
from executor.exchange import Beats, Heard
from executor.failure import Failure, first_cause
from executor.processes import kill_sessions, num_kernel_kills
from executor.rank import RankFiles
from executor.stalls import Stall
from executor.team import Team

__all__ = ["Attempts"]

_RESTART_S = 60.0  # for torchrun to see that a rank was killed, and to end the others
_STOP_S = 30.0  # torchrun waits so long for ranks to heed SIGTERM, and kills them then


class Attempts:
    """Of this node's ranks, and on node 0 of all.

    Args:
        failures: File of torchrun's failed ranks (``executor.agent``).
        files: Of all ranks.
        log_file: Of torchrun.
        team: The other nodes; None for none.
        max_restarts: How often all ranks are started again, those times included that a larger team has done so.
        on_restart: Called with why, each time.
        predicted_bytes: By rank, what it was predicted to need; empty without a prediction.

    Attributes:
        ended: Why each attempt before this one ended here.
        started_s: When the ranks of this one were started, or will have been.
        num_restarts: Told until now, with those of a larger team.
    """

    def __init__(
        self,
        failures: Path,
        files: Sequence[RankFiles],
        log_file: Path,
        team: Team | None,
        max_restarts: int,
        on_restart: Callable[[str], None] | None,
        predicted_bytes: Sequence[int],
    ) -> None:
        self.ended: list[Failure] = []
        self.started_s = time.monotonic()
        self._failures, self._files, self._log_file, self._team = failures, files, log_file, team
        self._max_restarts, self._on_restart = max_restarts, on_restart
        self._predicted_bytes = predicted_bytes
        self._first = 0 if team is None else team.first_attempt
        self.num_restarts = self._first
        self._hung: dict[int, tuple[float, Stall]] = {}
        self._kernel_kills = num_kernel_kills()

    def look(self, beats: Beats) -> None:
        """Sees whether an attempt has failed that another one follows."""
        exits = read_exits(self._failures)
        while len(self.ended) < min(len(exits), self._max_restarts - self._first):
            self.ended.append(self._failure(exits, beats))
            self.started_s = time.monotonic() + _STOP_S

    def beats_of_this(self, beats: Beats) -> Beats:
        """Without those of ranks of earlier attempts."""
        return tuple(None if beat is None or beat.attempt < self._attempt else beat for beat in beats)

    def heed(self, heard: Heard) -> None:
        """Ends the rank that node 0 has found to hang."""
        beat = None if heard.to_end is None else heard.beats[heard.to_end]
        if beat is not None and beat.attempt == self._attempt:
            kill_sessions([beat.pid])

    def tell(self, others: Sequence[Sequence[Failure]] = (), *, last: bool = False) -> None:
        """Tells of restarts, of each when all nodes have said why the attempt before it ended.

        Args:
            others: What other nodes say of theirs.
            last: What they have not said until now will not come.
        """
        accounts = [self.ended, *others]
        known = (max if last else min)(len(ended) for ended in accounts)
        while (place := self.num_restarts - self._first) < known:
            why = first_cause([ended[place] for ended in accounts if len(ended) > place])
            assert why is not None
            self.num_restarts += 1
            if self._on_restart is not None:
                self._on_restart(f"{why.sentence}; restart {self.num_restarts} of {self._max_restarts}")

    def end(self, stall: Stall, beats: Beats) -> bool:
        """Kills the rank that hangs, so that torchrun starts all again; False when no restart is left."""
        beat, attempt = beats[stall.rank], len(self.ended)
        if beat is None or self._attempt >= self._max_restarts:
            return False
        killed_s, first = self._hung.setdefault(attempt, (time.monotonic(), stall))
        if self._team is not None and first.rank not in self._team.ranks:
            self._team.exchange.end_rank(first.rank, attempt)
        elif first.rank == stall.rank:
            kill_sessions([beat.pid])
        return time.monotonic() - killed_s < _RESTART_S

    def failure(self, beats: Beats) -> Failure:
        """Why this attempt failed."""
        return self._failure(read_exits(self._failures), beats)

    def stalled(self, stall: Stall) -> Failure:
        """A hang as the reason why it failed."""
        return Failure(sentence=self._on(stall.rank, stall.sentence))

    def _failure(self, exits: Sequence[Mapping[int, int]], beats: Beats) -> Failure:
        attempt = len(self.ended)
        if attempt in self._hung:
            return self.stalled(self._hung[attempt][1])
        found = cause_of(
            exits[attempt] if attempt < len(exits) else {},
            self._files,
            beats,
            self._log_file,
            self._attempt,
            kernel_killed=num_kernel_kills() > self._kernel_kills,
            predicted_bytes=self._predicted_bytes,
        )
        return found.model_copy(update={"sentence": self._on(None, found.sentence)})

    @property
    def _attempt(self) -> int:
        """That goes on, counted from the beginning of the run."""
        return self._first + len(self.ended)

    def _on(self, rank: int | None, sentence: str) -> str:
        """With the node it is about: that of a rank, or this one."""
        if self._team is None:
            return sentence
        return f"{self._team.me if rank is None else self._team.node_of(rank)}: {sentence}"
