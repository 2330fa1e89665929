"""Numbers of candidates with few microbatches written out: for software that has no ``FastEvaluator``."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.predict.brief import brief_numbers
from simplan.search.candidate import Candidate
from simplan.search.held import HeldBytes
from simplan.search.least import LeastTimes
from simplan.search.outline import Outlines
from simplan.search.question import Question

__all__ = ["AbridgedEvaluator"]


_AT_ONCE = 8


class AbridgedEvaluator:
    """One Program of few microbatches a candidate; see ``LateEvaluator``.

    Bytes are those of ``predict``, give or take a few blocks of the allocator. So are times, but for long pipelines
    whose ranks wait for each other's messages: by about one percent (``simplan.predict.brief``). A Program takes
    longer than thousands of bounds, so memory is asked for as late as time.

    Args:
        question: What every candidate shares.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self.at_once = _AT_ONCE
        outlines = Outlines(question)
        self._held, self._least = HeldBytes(question, outlines), LeastTimes(question, outlines)

    def least_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return [self._held.bytes(candidate) for candidate in candidates]

    def least_time_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``."""
        return [self._least.seconds(candidate) for candidate in candidates]

    def device_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return [num_bytes for num_bytes, _ in self.numbers(candidates, 0)]

    def step_times_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``."""
        return [seconds for _, seconds in self.numbers(candidates, None) if seconds is not None]

    def numbers(self, candidates: Sequence[Candidate], capacity: int | None) -> list[tuple[int, float | None]]:
        """See ``LateEvaluator``."""
        asked = self._question
        return [brief_numbers(asked.job(c.plan()), capacity) for c in candidates]
