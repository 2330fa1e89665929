"""simplan: plan, predict and prove distributed training."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``simplan.search(...)`` without an import of its own; what it needs is imported when it is asked for."""
    if name == "search":
        return import_module("simplan.search")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
