"""Many plans: the best, and why not the others."""

from simplan.search.api import Progress, search
from simplan.search.inverse import Largest, largest
from simplan.search.objective import Goal
from simplan.search.question import Question
from simplan.search.result import Change, Explanation, NearestMiss, RankedPlan, SearchResult, SpaceCount
from simplan.search.space import RANGES, SearchSpace

__all__ = [
    "RANGES",
    "Change",
    "Explanation",
    "Goal",
    "Largest",
    "NearestMiss",
    "Progress",
    "Question",
    "RankedPlan",
    "SearchResult",
    "SearchSpace",
    "SpaceCount",
    "largest",
    "search",
]
