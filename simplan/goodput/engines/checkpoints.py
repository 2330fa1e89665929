"""Progress of a run, and the checkpoints to which it can go back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from simplan.goodput.setup import RunSetup, Size

REPEATED = ("compute", "evaluation", "checkpoint", "slow_device", "fewer_nodes")
"""Parts of ``WATERFALL`` that a run repeats when it goes back: their time becomes lost work."""
PAUSES = ("evaluation", "memory", "storage")
"""Pauses after a step, in their order."""
ROUNDING = 1e-6
"""Fraction of a step, or seconds, that are not told apart."""


@dataclass(slots=True)
class Progress:
    """Position of a run, and the seconds that led to it.

    Attributes:
        position: Full steps.
        due: Pauses that come before the next step.
        age_s: Age of the units when a checkpoint of this progress was complete; minus infinity for the start.
        spent_s: Seconds by part of ``REPEATED``.
    """

    position: float = 0.0
    due: tuple[str, ...] = ()
    age_s: float = -inf
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REPEATED, 0.0))

    def copy(self, age_s: float) -> Progress:
        """Copy for a checkpoint that is complete at an age."""
        return replace(self, age_s=age_s, spent_s=dict(self.spent_s))

    def steps_until_pause(self, setup: RunSetup, advance: float) -> int:
        """Steps until the next pause, or until the end of the run."""
        ends = [(floor(self.position / every + ROUNDING) + 1) * every for every in _intervals(setup).values() if every]
        return ceil((min([setup.num_steps, *ends]) - self.position) / advance - ROUNDING)

    def take_steps(self, setup: RunSetup, num: int, size: Size, step_s: float) -> None:
        """Advance by steps on a size that take ``step_s`` each."""
        full_s = size.advance * setup.step_s
        self.spent_s["compute"] += num * full_s
        self.spent_s["fewer_nodes"] += num * (size.step_s - full_s)
        self.spent_s["slow_device"] += num * (step_s - size.step_s)
        before, self.position = self.position, self.position + num * size.advance
        self.due = tuple(
            pause
            for pause, every in _intervals(setup).items()
            if every and floor(self.position / every + ROUNDING) > floor(before / every + ROUNDING)
        )


def _intervals(setup: RunSetup) -> dict[str, int]:
    """Steps between pauses, 0 for none."""
    return dict(zip(PAUSES, (setup.evaluation_every, setup.memory_every, setup.checkpoint_every), strict=True))


class Checkpoints:
    """Checkpoints in storage, oldest first, one in memory, and one that is being written."""

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self._stored: deque[Progress] = deque(maxlen=setup.keep or None)
        self._memory: Progress | None = None
        self._in_flight: Progress | None = None
        self._counts_at_s = -inf
        self.num_written = 0

    def save(self, progress: Progress, now_s: float, write_s: float = 0.0) -> None:
        """Write a checkpoint to the storage that counts after ``write_s``."""
        self._in_flight, self._counts_at_s = progress, now_s + write_s
        self.num_written += 1
        self._settle(now_s)

    def save_in_memory(self, progress: Progress) -> None:
        """Replace the checkpoint in memory."""
        self._memory = progress

    def wait_s(self, now_s: float) -> float:
        """Seconds until the checkpoint that is being written counts."""
        self._settle(now_s)
        return self._counts_at_s - now_s if self._in_flight else 0.0

    def lose_in_flight(self, now_s: float) -> None:
        """Lose a checkpoint that does not count yet."""
        self._settle(now_s)
        self._in_flight = None

    def lose_memory(self) -> None:
        """Lose the checkpoint in memory."""
        self._memory = None

    def lose_since(self, age_s: float) -> None:
        """Lose the checkpoints that were complete after an age."""
        while self._stored and self._stored[-1].age_s > age_s:
            self._stored.pop()

    def last(self) -> tuple[Progress, float]:
        """Progress of the last checkpoint, or of the start, and the seconds to load it."""
        last, load_s = Progress(), 0.0
        if self._stored:
            last, load_s = self._stored[-1], self._setup.load_s
        if self._memory and self._memory.age_s > last.age_s:
            last, load_s = self._memory, self._setup.memory_load_s
        return last.copy(last.age_s), load_s

    def _settle(self, now_s: float) -> None:
        if self._in_flight and self._counts_at_s <= now_s + ROUNDING:
            self._stored.append(self._in_flight)
            self._in_flight = None
