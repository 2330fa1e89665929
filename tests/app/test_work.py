"""Work beside the pages: done once, refused in the words of simplan, also from another process."""

from __future__ import annotations

import pytest

from app import work
from simplan.errors import NotModelledError, Problem, RunError, SpecError

CALLS: list[int] = []


def double(value: int) -> int:
    CALLS.append(value)
    return 2 * value


def refuse(kind: type[SpecError]) -> None:
    raise kind(
        [Problem(field="plan.pp", value="3", rule="must be 2"), Problem(field="plan.tp", rule="is odd")], file="x"
    )


def fail() -> None:
    raise ZeroDivisionError


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CALLS.clear()
    work._desk.clear()


def test_what_was_asked_is_not_asked_again() -> None:
    assert [work.awaited("doubling", double, 3) for _ in range(3)] == [6, 6, 6]
    assert work.awaited("doubling", double, value=4) == 8
    assert CALLS == [3, 4]


@pytest.mark.parametrize("kind", [SpecError, NotModelledError])
def test_refusals_arrive_as_they_were(kind: type[SpecError]) -> None:
    with pytest.raises(kind) as caught:
        work.awaited("refusing", refuse, kind)
    assert type(caught.value) is kind
    assert [problem.field for problem in caught.value.problems] == ["plan.pp", "plan.tp"]
    assert caught.value.file == "x"


def test_a_bug_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.awaited("failing", fail)


@pytest.mark.slow
def test_processes_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(work.WORKERS, "1")
    with pytest.raises(SpecError, match="must be 2"):
        work.awaited("refusing", refuse, SpecError)
    with pytest.raises(RunError, match="ended"):
        work.awaited("ending", os._exit, 1)
    assert work.awaited("doubling", double, 5) == 10
    work._desk().shut()
