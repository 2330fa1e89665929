"""Explanations: every term of a prediction with its formula and numbers, and differences of two predictions."""

from simplan.explain.difference import Difference, DifferenceRow, difference
from simplan.explain.explanation import Explanation, explain
from simplan.explain.term import ExplainedTerm

__all__ = ["Difference", "DifferenceRow", "ExplainedTerm", "Explanation", "difference", "explain"]
