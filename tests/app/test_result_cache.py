"""Work beside the pages: done once, refused in the words of simplan, also from another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app import result_cache
from app.jobs.job import WORKERS, Done, Report, StartedJob, TaskRequest, page_jobs
from app.predictions import prediction_text, trace_text
from simplan.errors import NotModelledError, Problem, RunError, SpecError
from tests.app.views.pages import SMALL

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
def _fresh() -> Iterator[None]:
    CALLS.clear()
    page_jobs.cache_clear()
    yield
    page_jobs().close()
    page_jobs.cache_clear()


def test_answered_questions_are_not_asked_again() -> None:
    assert [result_cache.awaited("doubling", double, 3) for _ in range(3)] == [6, 6, 6]
    assert result_cache.awaited("doubling", double, value=4) == 8
    assert CALLS == [3, 4]


def test_tensors_that_are_handed_over_are_not_kept() -> None:
    assert [result_cache.handed_over(double, 3) for _ in range(2)] == [6, 6]
    assert CALLS == [3, 3]
    with pytest.raises(SpecError):
        result_cache.handed_over(refuse, SpecError)


def test_large_files_are_made_where_pages_do_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(self: TaskRequest, report: Report) -> Done:
        asked.append(self.task.__qualname__)
        return Done("made elsewhere")

    monkeypatch.setattr(TaskRequest, "run", answer)
    inputs = result_cache.worker_inputs(dict(SMALL))
    made = [result_cache.handed_over(task, *inputs) for task in (prediction_text, trace_text)]
    assert made == 2 * ["made elsewhere"]
    assert asked == ["prediction_text", "trace_text"]


@pytest.mark.parametrize("kind", [SpecError, NotModelledError])
def test_refusals_arrive_as_they_were(kind: type[SpecError]) -> None:
    with pytest.raises(kind) as caught:
        result_cache.awaited("refusing", refuse, kind)
    assert type(caught.value) is kind
    assert [problem.field for problem in caught.value.problems] == ["plan.pp", "plan.tp"]
    assert caught.value.file == "x"


def test_a_bug_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            result_cache.awaited("failing", fail)


@pytest.mark.slow
def test_processes_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(WORKERS, "1")
    with pytest.raises(SpecError, match="must be 2"):
        result_cache.awaited("refusing", refuse, SpecError)
    with pytest.raises(RunError, match="ended"):
        result_cache.awaited("ending", os._exit, 1)
    assert result_cache.awaited("doubling", double, 5) == 10
    with pytest.raises(RunError, match="ZeroDivisionError"):
        result_cache.awaited("failing", fail)
    assert result_cache.awaited("asking", os.getpid) == result_cache.done(os.getpid), "one worker, asked again"


def test_operations_that_nobody_waits_for_are_not_started() -> None:
    job = StartedJob(TaskRequest(double, (3,)))
    assert job.join()
    assert job.join()
    job.leave()
    assert not job.ended.is_set()
    job.leave()
    assert job.ended.is_set()
    assert not job.join()
