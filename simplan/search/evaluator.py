"""What a search asks about plans: how much memory, how long at least, how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from simplan.search.candidate import Candidate

__all__ = ["Evaluator", "LateEvaluator"]


class Evaluator(Protocol):
    """Numbers of many candidates, each as ``predict`` would give them. Candidates have passed the rules."""

    def least_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """Bounds that ``device_bytes`` are never below; cheap beside these, and 0 where they are cheap themselves."""
        ...

    def device_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """Device memory of the worst rank at its worst instant, context and all of the allocator's reserve included.

        The reserve counts although a device can do with less: steps are then slower than predicted.
        """
        ...

    def least_time_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Bounds that step times are never below; cheap."""
        ...

    def step_times_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Times of one optimizer step at Level 2."""
        ...


class LateEvaluator(Evaluator, Protocol):
    """One that needs as long for the memory of a plan as for its time, so that it is asked for few.

    Attributes:
        at_once: How many to ask for at once.
    """

    at_once: int

    def numbers(self, candidates: Sequence[Candidate], capacity: int | None) -> list[tuple[int, float | None]]:
        """Device memory and step time of each; no time of those that need more than the capacity."""
        ...
