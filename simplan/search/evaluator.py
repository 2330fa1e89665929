"""Numbers of candidates: bounds that cost little, and truncated or whole steps in one process or in several."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pickle import dumps
from typing import Any

from simplan.predict.build import cost_model
from simplan.predict.step_summary import evaluate_step
from simplan.predict.truncated import extent_of
from simplan.search.candidate import Candidate
from simplan.search.layer_sums import LayerSumsCache
from simplan.search.memory_bounds import AverageRankMemoryBound, EndRankMemoryBound
from simplan.search.question import Question
from simplan.search.step_time_bound import StepTimeBound, compute_bound_s

__all__ = ["AT_ONCE", "Evaluator", "Numbers"]

AT_ONCE = 16
"""Candidates that are evaluated together, whatever the number of processes: what is left out does not depend on it."""
_ALONE = 32  # so many are evaluated before there are other processes in less time than these take to start

Numbers = tuple[int, float | None]


class Evaluator:
    """Bounds on candidates, and their numbers.

    Args:
        question: What every candidate shares.
        jobs: Processes, or workers of the backend that joblib is told to use; -1 for one a core.
    """

    def __init__(self, question: Question, jobs: int = 1) -> None:
        self._question, self._jobs = question, jobs
        self._average = AverageRankMemoryBound(question)
        self._on_shared_cores = question.calibration is not None or question.cluster.cores_per_node is not None
        if not self._on_shared_cores:
            sums = LayerSumsCache(question)
            self._ends, self._times = EndRankMemoryBound(question, sums), StepTimeBound(question, sums)
        self._compute_s: dict[Candidate, float] = {}
        self._pool: Any = None
        self._num_done = 0
        self._token = ""

    def average_bytes(self, candidate: Candidate) -> int:
        """Bytes that the worst device needs at least: those of an average rank."""
        return self._average.bytes(candidate)

    def least_bytes(self, candidate: Candidate) -> int:
        """The same by what the ends of its pipeline hold, which costs more."""
        return 0 if self._on_shared_cores else self._ends.bytes(candidate)

    def least_time_s(self, candidate: Candidate) -> float:
        """Seconds that a step takes at least."""
        if not self._on_shared_cores:
            return self._times.seconds(candidate)
        same = candidate._replace(reshard_after_forward=True)  # computes the same
        if same not in self._compute_s:
            job = self._question.job(same.plan())
            cost = cost_model(job, self._question.calibration)
            self._compute_s[same] = compute_bound_s(job, cost)
        return self._compute_s[same]

    def numbers(self, candidates: Sequence[Candidate], max_bytes: int | None, *, whole: bool = False) -> list[Numbers]:
        """Device memory and step time of each; no time of those that need more than ``max_bytes``.

        Args:
            candidates: The plans; they keep the rules.
            max_bytes: None for no limit.
            whole: To be as ``predict`` has them; else of truncated steps.
        """
        self._num_done += len(candidates)
        if self._jobs == 1 or self._num_done <= _ALONE:
            return [_numbers(self._question, candidate, max_bytes, whole) for candidate in candidates]
        from joblib import Parallel, delayed

        if self._pool is None:
            self._pool = Parallel(n_jobs=self._jobs, batch_size=1)
            self._token = sha256(dumps(self._question)).hexdigest()
        calls = (delayed(_worker_numbers)(self._token, self._question, c, max_bytes, whole) for c in candidates)
        return list(self._pool(calls))

    def is_truncated(self, candidate: Candidate) -> bool:
        """Whether the numbers of a truncated step may differ from those of ``predict``."""
        question = self._question
        deals = candidate.shards_optimizer_only and question.software.optimizer_shards == "parameters"
        if question.cluster.cores_per_node is not None:
            return False
        return deals or extent_of(question.job(candidate.plan())).period > 0


def _numbers(question: Question, candidate: Candidate, max_bytes: int | None, whole: bool) -> Numbers:
    return evaluate_step(question.job(candidate.plan()), question.calibration, max_bytes, whole=whole)


_questions: dict[str, Question] = {}  # of this process: one object, whose layers are made once


def _worker_numbers(
    token: str, question: Question, candidate: Candidate, max_bytes: int | None, whole: bool
) -> Numbers:
    if token not in _questions:
        _questions.clear()
        _questions[token] = question
    return _numbers(_questions[token], candidate, max_bytes, whole)
