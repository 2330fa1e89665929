"""Search over parallel plans: the best plans, and why the others lost.

The package is callable: ``simplan.search(job)`` calls ``simplan.search.search``.
"""

import sys
from types import ModuleType
from typing import Any

from simplan.search.api import SearchProgress, search
from simplan.search.fixes import Fix, fixes
from simplan.search.largest import Largest, largest
from simplan.search.objective import Goal
from simplan.search.result import (
    EquivalentPlans,
    NearestMiss,
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
    "RankedPlan",
    "RequestChange",
    "SearchExplanation",
    "SearchProgress",
    "SearchResult",
    "SearchSpace",
    "SpaceCount",
    "fixes",
    "largest",
    "search",
]


class _Callable(ModuleType):
    """Module type that makes the package callable as ``search``."""

    def __call__(self, *args: Any, **kwargs: Any) -> SearchResult:
        return search(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
