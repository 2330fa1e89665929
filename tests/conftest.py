"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.support.slow import LONG_TESTS

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--cpu-times=FOLDER`` writes the CPU seconds of every test, for ``python -m tests.support.slow``."""
    parser.addoption("--cpu-times", type=Path, help="folder for the CPU seconds of every test, by worker")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Writes the CPU seconds of a test, and of its fixtures and processes, if they are asked for."""
    folder, before = item.config.option.cpu_times, sum(os.times()[:4])
    result = yield
    if folder is not None:
        with (folder / f"{os.getpid()}.tsv").open("a", encoding="utf-8") as file:
            file.write(f"{sum(os.times()[:4]) - before:.2f}\t{item.nodeid}\n")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests whose CPU time was measured to be long are slow."""
    long = set(LONG_TESTS.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)


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
