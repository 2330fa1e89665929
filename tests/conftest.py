"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler.loadscope import LoadScopeScheduling

# Python starts a few hundred times, here and in children, and a start without bytecode mostly compiles our modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes depends on the machine, and no test of ours asserts a time.
settings.register_profile("new examples", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same examples", settings.get_profile("new examples"), derandomize=True, max_examples=30)

ONE_WORKER = (
    "tests/app/test_captured.py",
    "tests/cli/test_run.py",
    "tests/executor/distributed/test_compression.py",
    "tests/executor/distributed/test_split_layers.py",
    "tests/executor/train/test_asynchronous.py",
    "tests/executor/train/test_checkpoints.py",
    "tests/explain/test_explain.py",
    "tests/explain/test_ways_map.py",
    "tests/report/test_html.py",
    "tests/search/test_exact.py",
    "tests/search/test_partial.py",
    "tests/validate/test_compare.py",
)
"""Their tests share what is dear to make."""


OF_SOURCES = (
    "tests/test_architecture.py",
    "tests/test_docs.py::test_pages_that_messages_name_exist",
    "tests/test_words.py",
)
"""Tests that read the syntax trees of all modules."""


class SharedRuns(LoadScopeScheduling):
    """Tests that look at one run go to the worker that made it; all others go wherever there is time."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file in ONE_WORKER:
            return file
        if nodeid.startswith(OF_SOURCES):
            return "sources"
        if file.startswith("tests/scenario/published/"):
            return "published runs"
        if file.startswith("tests/executor/") and test.endswith("]"):
            return test[test.index("[") :]
        return nodeid


def pytest_configure(config: pytest.Config) -> None:
    """The quick tests look at the same examples every time; all tests, where they run by hand, at more and new ones."""
    same = bool(os.environ.get("CI")) or "not slow" in config.option.markexpr
    settings.load_profile("same examples" if same else "new examples")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps what collection makes out of garbage collections, which would look at it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedRuns:
    """How ``pytest -n`` spreads the tests (its ``xdist_group`` marks are lost in pytest 9.2)."""
    return SharedRuns(config, log)
