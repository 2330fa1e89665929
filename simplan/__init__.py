"""simplan: plan, predict and prove distributed training.

::

    simplan.load_scenario("plan.yaml").predict()            # a Prediction
    simplan.load_search("search.yaml").search()             # a SearchResult
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_FROM = {"load_scenario": "simplan.scenario", "load_search": "simplan.scenario"}


def __getattr__(name: str) -> Any:
    """Import the public API on first access, so that ``import simplan`` is fast."""
    if name in _FROM:
        return getattr(import_module(_FROM[name]), name)
    if name == "search":
        return import_module("simplan.search")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM])
