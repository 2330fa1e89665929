"""Which evaluator serves a search."""

from __future__ import annotations

from simplan.search.evaluator import Evaluator
from simplan.search.question import Question
from simplan.search.reference import ReferenceEvaluator

__all__ = ["make_evaluator"]


def make_evaluator(question: Question) -> Evaluator:
    """The fastest evaluator that covers a question.

    Args:
        question: Model, cluster, training, software and calibration, which all candidates share.
    """
    return ReferenceEvaluator(question)
