"""What a search asks about plans: how much memory, how long at least, how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from simplan.search.candidate import Candidate

__all__ = ["Evaluator"]


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
