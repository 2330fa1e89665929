"""Which evaluator serves a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from simplan.search.candidate import Candidate
from simplan.search.evaluator import Evaluator, LateEvaluator
from simplan.search.question import Question
from simplan.search.reference import ReferenceEvaluator

if TYPE_CHECKING:
    from simplan.search.fast import FastEvaluator

__all__ = ["abridges", "make_evaluator", "make_late_evaluator"]

_Number = TypeVar("_Number", int, float)


def abridges(question: Question) -> bool:
    """Whether few microbatches tell of all: devices are their own. On shared cores all are simulated."""
    return question.calibration is None and question.cluster.cores_per_node is None


def make_evaluator(question: Question) -> Evaluator:
    """The fastest evaluator that covers a question: many plans at once, and one by one what is out of the ordinary.

    Args:
        question: Model, cluster, training, software and calibration, which all candidates share.
    """
    from simplan.search.fast import FastEvaluator, covers_job  # brings numba, which takes longer than a small search

    if covers_job(question):
        return _Both(FastEvaluator(question), ReferenceEvaluator(question))
    if not abridges(question):
        return ReferenceEvaluator(question)
    from simplan.search.abridged import AbridgedEvaluator

    return AbridgedEvaluator(question)


def make_late_evaluator(question: Question, jobs: int) -> LateEvaluator | None:
    """The evaluator of a search best first; None where another one has many plans at once.

    Args:
        question: As of ``make_evaluator``.
        jobs: Processes.
    """
    from simplan.search.fast import covers_job  # brings numba

    if covers_job(question) or not abridges(question):
        return None
    if jobs == 1:
        from simplan.search.abridged import AbridgedEvaluator

        return AbridgedEvaluator(question)
    from simplan.search.spread import SpreadEvaluator  # brings joblib

    return SpreadEvaluator(question, jobs)


class _Both:
    """An ``Evaluator`` of two.

    Args:
        fast: For what it covers.
        slow: For all else.
    """

    def __init__(self, fast: FastEvaluator, slow: ReferenceEvaluator) -> None:
        self._fast, self._slow = fast, slow

    def least_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return self._asked(candidates, self._fast.least_bytes, self._slow.least_bytes)

    def device_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return self._asked(candidates, self._fast.device_bytes, self._slow.device_bytes)

    def least_time_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``."""
        return self._asked(candidates, self._fast.least_time_s, self._slow.least_time_s)

    def step_times_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``."""
        return self._asked(candidates, self._fast.step_times_s, self._slow.step_times_s)

    def _asked(
        self,
        candidates: Sequence[Candidate],
        fast: Callable[[Sequence[Candidate]], list[_Number]],
        slow: Callable[[Sequence[Candidate]], list[_Number]],
    ) -> list[_Number]:
        covered = [self._fast.covers(c) for c in candidates]
        quick = iter(fast([c for c, is_covered in zip(candidates, covered, strict=True) if is_covered]))
        rest = iter(slow([c for c, is_covered in zip(candidates, covered, strict=True) if not is_covered]))
        return [next(quick if is_covered else rest) for is_covered in covered]
