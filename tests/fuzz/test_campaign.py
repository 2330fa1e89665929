"""Damaged files of every kind: each is understood or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.campaign import KINDS, Kind, run_campaign, run_one
from tests.fuzz.executor_kinds import EXECUTOR_KINDS
from tests.fuzz.framework_kinds import FRAMEWORK_KINDS
from tests.fuzz.mutation import Mutator

ALL_KINDS = KINDS + FRAMEWORK_KINDS + EXECUTOR_KINDS
NUM_QUICK = 10


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_damaged_files_are_understood_or_refused(kind: Kind) -> None:
    assert list(run_campaign(kind, NUM_QUICK, seed=0)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("part", range(8))
def test_many_more_are(kind: Kind, part: int) -> None:
    """200,000 inputs over all kinds, others than those."""
    number = -(-200_000 // len(ALL_KINDS) // 8)
    assert list(run_campaign(kind, number, seed=10_000 + part * number)) == []


@pytest.mark.parametrize(
    ("behavior", "told"),
    [
        (lambda args: 1 / 0, "ZeroDivisionError"),
        (lambda args: 70, "it ended with 70"),
        (lambda args: 2, "it ended with 2 and said nothing"),
        (lambda args: Path(args[-1]).write_text("{") and 2, "and said nothing"),
        (lambda args: [None] * 10**9, "MemoryError"),
    ],
)
def test_bad_ends_are_found(behavior: Callable[[list[str]], int], told: str) -> None:
    """Every way of ending that is no answer, by a command that ends so."""
    (finding,) = run_campaign(replace(KINDS[0], run=behavior), 1, seed=0)
    assert told in finding.what


def test_a_hang_is_found(tmp_path: Path) -> None:
    def hang(args: list[str]) -> int:
        while True:
            pass

    finding = run_one(replace(KINDS[0], run=hang), 0, tmp_path / "input", limit_s=1)
    assert finding is not None
    assert finding.what == "not done after 1 s of CPU time"


def test_a_seed_makes_the_same_input() -> None:
    document = {"a": [1, 2, {"b": "c"}], "d": None}
    assert [Mutator(7).json('{"a": [1, 2]}') for _ in range(2)] == [Mutator(7).json('{"a": [1, 2]}')] * 2
    assert repr(Mutator(3).changed(document)) == repr(Mutator(3).changed(document))
    assert document == {"a": [1, 2, {"b": "c"}], "d": None}
