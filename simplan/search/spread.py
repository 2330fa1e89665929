"""A slow evaluator in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pickle import dumps

from joblib import Parallel, delayed, effective_n_jobs

from simplan.search.abridged import AbridgedEvaluator
from simplan.search.candidate import Candidate
from simplan.search.question import Question

__all__ = ["SpreadEvaluator"]

_ALONE = 16  # so many are done before there are other processes in less time than these take to start


class SpreadEvaluator(AbridgedEvaluator):
    """As the ``AbridgedEvaluator``, which every process has; bounds are made in this one.

    Args:
        question: What every candidate shares.
        jobs: Processes, or workers of the backend that joblib is told to use; -1 for one a core.
    """

    def __init__(self, question: Question, jobs: int) -> None:
        super().__init__(question)
        workers = effective_n_jobs(jobs)
        self.at_once = max(self.at_once, 2 * workers)
        self._pool = Parallel(n_jobs=jobs, batch_size=1)
        self._token = sha256(dumps(question)).hexdigest()
        self._done = 0

    def numbers(self, candidates: Sequence[Candidate], capacity: int | None) -> list[tuple[int, float | None]]:
        """See ``LateEvaluator``."""
        self._done += len(candidates)
        if self._done <= _ALONE:
            return super().numbers(candidates, capacity)
        calls = (delayed(_numbers)(self._token, self._question, candidate, capacity) for candidate in candidates)
        return list(self._pool(calls))


_evaluators: dict[str, AbridgedEvaluator] = {}  # of this process: what it remembers serves the next candidate


def _numbers(token: str, question: Question, candidate: Candidate, capacity: int | None) -> tuple[int, float | None]:
    if token not in _evaluators:
        _evaluators.clear()
        _evaluators[token] = AbridgedEvaluator(question)
    [found] = _evaluators[token].numbers([candidate], capacity)
    return found
