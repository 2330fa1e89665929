"""Every term of a prediction with its formula and its numbers, and the difference of two, term by term."""

from simplan.explain.difference import Difference, DifferenceRow, difference
from simplan.explain.explanation import Explanation, explain
from simplan.explain.part import ExplainedTerm

__all__ = ["Difference", "DifferenceRow", "ExplainedTerm", "Explanation", "difference", "explain"]
