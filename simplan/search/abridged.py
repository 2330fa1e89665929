"""Numbers of candidates with few microbatches written out: for software that has no ``FastEvaluator``."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.predict.brief import brief_bytes, predict_brief
from simplan.search.candidate import Candidate
from simplan.search.held import HeldBytes
from simplan.search.question import Question
from simplan.search.reference import ReferenceEvaluator
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["AbridgedEvaluator", "abridges"]


def abridges(question: Question) -> bool:
    """Whether devices are their own: where ranks share cores all microbatches are simulated."""
    return question.calibration is None and question.cluster.cores_per_node is None


class AbridgedEvaluator(ReferenceEvaluator):
    """One Program of few microbatches a candidate; see ``Evaluator``.

    Bytes are those of ``predict``, give or take a few blocks of the allocator. So are times, but for long pipelines
    whose ranks wait for each other's messages: by about one percent (``simplan.predict.brief``).

    Args:
        question: What every candidate shares.
    """

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self._held = HeldBytes(question)

    def least_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return [self._held.bytes(candidate) for candidate in candidates]

    def _device_bytes(self, candidate: Candidate) -> int:
        if candidate not in self._bytes:
            self._bytes[candidate] = brief_bytes(*self._asked(candidate.plan()))
        return self._bytes[candidate]

    def _step_time_s(self, candidate: Candidate) -> float:
        if candidate not in self._seconds:
            self._seconds[candidate] = predict_brief(*self._asked(candidate.plan())).step_time_s
        return self._seconds[candidate]

    def _asked(self, plan: ParallelPlan) -> tuple[ModelSpec, ClusterSpec, TrainingSpec, ParallelPlan, SoftwareSpec]:
        asked = self._question
        return asked.model, asked.cluster, asked.training, plan, asked.software
