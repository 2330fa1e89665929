"""Tests of many cases or examples, most of which only `make test-all` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all cases, one or a tuple of values each, of which only the quick ones always run."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]


def examples(quick: int, of_all: int) -> int:
    """Number of examples of a dear property: of the quick tests, which look at the same ones every time, or of all."""
    return quick if settings().derandomize else of_all
