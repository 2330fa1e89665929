"""Search over parallel plans: the best plans, and why the others lost."""

from simplan.search.api import search
from simplan.search.fixes import Fix, fixes
from simplan.search.incumbents import Goal
from simplan.search.largest import Largest, largest
from simplan.search.progress import SearchPhase, SearchProgress
from simplan.search.result import (
    EquivalentPlans,
    NearestMiss,
    OtherSoftware,
    RankedPlan,
    RequestChange,
    SearchExplanation,
    SearchResult,
    SpaceCount,
)
from simplan.search.space import RANGES, SearchSpace

__all__ = [
    "RANGES",
    "EquivalentPlans",
    "Fix",
    "Goal",
    "Largest",
    "NearestMiss",
    "OtherSoftware",
    "RankedPlan",
    "RequestChange",
    "SearchExplanation",
    "SearchPhase",
    "SearchProgress",
    "SearchResult",
    "SearchSpace",
    "SpaceCount",
    "fixes",
    "largest",
    "search",
]
