"""simplan: plan, predict and prove distributed training.

::

    simplan.predict("llama3-8b", num_devices=64, tp=8)      # a Prediction: time and memory of a step
    job = simplan.make_job("llama3-8b", num_devices=64, tp=8)
    simplan.search(job, tp=[1, 2, 4, 8])                    # a SearchResult: the best plans of a space
    simplan.sweep(job, microbatch_size=[1, 2])              # a pandas.DataFrame
    simplan.goodput("run.yaml", spares=4)                   # a GoodputResult: days and cost of a run with failures

Names of ``__all__`` are loaded on first access, so that ``import simplan`` is fast. ``__init__.pyi`` has their types.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.2.0"

__all__ = [
    "Fix",
    "GoodputResult",
    "Job",
    "Prediction",
    "Scenario",
    "SearchResult",
    "SearchSpace",
    "SimplanError",
    "SpecError",
    "compare",
    "explain",
    "fixes",
    "goodput",
    "load_scenario",
    "load_search",
    "make_job",
    "predict",
    "search",
    "sweep",
]

_MODULES = {
    "simplan.api": "goodput predict search sweep",
    "simplan.errors": "SimplanError SpecError",
    "simplan.explain": "explain",
    "simplan.goodput.result": "GoodputResult",
    "simplan.job": "Job",
    "simplan.prediction": "Prediction",
    "simplan.scenario": "Scenario load_scenario load_search make_job",
    "simplan.search": "Fix SearchResult SearchSpace fixes",
    "simplan.interop.compare_files": "compare",
}
"""Modules of the public names."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


class _Package(ModuleType):
    """Package in which ``predict``, ``search``, ``explain`` and ``goodput`` are functions, and folders, too.

    ``from simplan.predict import ...`` imports from the folder.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULE_OF[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, except for the folder of a public name, which Python's import system sets."""
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
