"""Tests that only `make test-all` runs: most cases or examples of some, and those that were measured to be long.

    pytest -m "not slow" -n auto --cpu-times=FOLDER && python -m tests.support.slow FOLDER

adds to long_tests.txt what has become long: tests above 2.5 CPU seconds, and above 1 all cases of a test but the
shortest. Lines of tests that are gone do nothing; delete the file before the first command to measure all anew.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

LONG_TESTS = Path(__file__).with_name("long_tests.txt")
"""Ids of tests, one per line."""
_LONG_S, _LONG_CASE_S = 2.5, 1.0
_ALWAYS = ("tests/test_architecture.py", "tests/test_words.py")
"""Files whose tests always run, which hold the rules of the house."""


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all cases, one or a tuple of values each, of which only the quick ones always run."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]


def examples(quick: int, of_all: int) -> int:
    """Number of examples of a dear property: of the quick tests, which look at the same ones every time, or of all."""
    return quick if settings().derandomize else of_all


def long_tests(cpu_s: Mapping[str, float]) -> list[str]:
    """Ids of tests that take long, by the CPU seconds of all that ran.

    >>> long_tests({"a": 3.0, "b[0]": 1.5, "b[1]": 1.2, "b[2]": 0.1, "c[0]": 2.0, "c[1]": 1.8})
    ['a', 'b[0]', 'b[1]', 'c[0]']
    """

    def function(test: str) -> str:
        return test.partition("[")[0]

    too_long = []
    for _, cases in groupby(sorted(test for test in cpu_s if not test.startswith(_ALWAYS)), key=function):
        shortest, *others = sorted(cases, key=lambda test: cpu_s[test])
        too_long += [test for test in (shortest,) if cpu_s[test] > _LONG_S]
        too_long += [test for test in others if cpu_s[test] > _LONG_CASE_S]
    return sorted(too_long)


if __name__ == "__main__":
    lines = [line for file in Path(sys.argv[1]).glob("*.tsv") for line in file.read_text(encoding="utf-8").splitlines()]
    measured = {test: float(seconds) for seconds, _, test in (line.partition("\t") for line in lines)}
    known = LONG_TESTS.read_text(encoding="utf-8").splitlines() if LONG_TESTS.exists() else []
    LONG_TESTS.write_text("\n".join([*sorted({*known, *long_tests(measured)}), ""]), encoding="utf-8")
