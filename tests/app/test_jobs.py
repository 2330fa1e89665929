"""Work in processes of its own: answers, stops, refusals; real workers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from app.figures.plans import Pace, search_plans
from app.jobs.job import Failed, Jobs, JobState, StartedJob, TaskRequest, _worker
from app.jobs.limits import Limits
from simplan.errors import RunError, SpecError
from simplan.scenario import parse_search
from simplan.search import SearchResult, search

SMALL = """\
model: {family: llama, num_hidden_layers: 4, hidden_size: 64, num_attention_heads: 4, intermediate_size: 128,
  vocab_size: 96, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 8}
search: {objectives: [step_time, memory], top: 3, microbatch_size: [1, 2]}
"""
WRONG = SMALL.replace("preset: dgx-h100", "preset: dgx-h1000")
LARGE = """\
model: {preset: gpt3-175b, vocab_size: 51200, tied_embeddings: false}
cluster: {preset: dgx-a100-80gb, num_devices: 1024}
training: {global_batch_size: 1536}
search: {objectives: [step_time, memory], top: 3}
"""


UNLIMITED = Limits(3600, 2**40, 3600)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    server_jobs = Jobs(1, UNLIMITED)
    yield server_jobs
    server_jobs.close()


def searching(text: str) -> TaskRequest:
    return TaskRequest(search_plans, (text,), reports_progress=True)


def until(job: StartedJob, holds: Callable[[StartedJob], bool], *, watched: bool = True) -> None:
    deadline_s = time.monotonic() + 600
    while not holds(job):
        assert time.monotonic() < deadline_s
        if watched:
            job.watch()
        time.sleep(0.02)


def has_ended(job: StartedJob) -> bool:
    return job.state is JobState.ENDED


@contextmanager
def pool(max_running: int, limits: Limits, small_s: float | None = None) -> Iterator[Jobs]:
    server_jobs = Jobs(max_running, limits, keep=True, small_s=small_s)
    yield server_jobs
    server_jobs.close()


def grow() -> None:
    """Takes memory without an end and without progress, as a large simulation does."""
    kept = []
    while True:
        kept.append(os.urandom(2**24))


def sleeping() -> TaskRequest:
    return TaskRequest(time.sleep, (3600,))


def test_a_worker_finds_what_search_finds(jobs: Jobs) -> None:
    jobs.warm()
    job = jobs.start("small", searching(SMALL))
    assert jobs.start("small", searching(SMALL)) is job, "equal questions are asked once"
    until(job, lambda job: job.state is JobState.ENDED)
    asked = parse_search(SMALL)
    alone = search(asked.job, asked.space)
    assert isinstance(job.value, SearchResult)
    assert job.value.ranked == alone.ranked
    assert all(plan.explanation is not None for plan in job.value.pareto), "those of the front, too"
    ranked = {plan.plan for plan in alone.ranked}
    front = [plan if plan.plan in ranked else replace(plan, explanation=None) for plan in job.value.pareto]
    assert front == [*alone.pareto]
    assert jobs.start("small", searching(SMALL)) is job, "an answer is kept"


@pytest.mark.slow
def test_running_job_that_no_page_waits_for_ends() -> None:
    with pool(1, Limits(3600, 2**40, 1)) as jobs:
        job = jobs.start("left", sleeping())
        assert job.join()
        until(job, lambda job: job.state is JobState.RUNNING, watched=False)
        time.sleep(2)
        assert job.state is JobState.RUNNING, "a page waits"
        job.leave()
        until(job, has_ended, watched=False)
        assert (job.stopped, job.error) == (True, None)
        again = jobs.start("next", TaskRequest(os.getpid))
        until(again, has_ended)
        assert again.result()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "request_", "words"),
    [
        (Limits(3, 2**40, 3600), sleeping(), "longer than 0.05 min"),
        (Limits(3600, 2**30, 3600), TaskRequest(grow), "more than 1.00 GiB"),
    ],
)
def test_job_at_a_limit_ends_with_a_sentence(limits: Limits, request_: TaskRequest, words: str) -> None:
    with pool(1, limits) as jobs:
        job = jobs.start("limited", request_)
        until(job, has_ended)
        with pytest.raises(RunError, match=f"{words}.*fewer devices"):
            job.result()


@pytest.mark.slow
def test_large_jobs_leave_one_worker_to_small_ones() -> None:
    with pool(2, UNLIMITED, small_s=5) as jobs:
        large = [jobs.start(number, sleeping()) for number in range(3)]
        small = [jobs.start(f"small {number}", TaskRequest(os.getpid)) for number in range(2)]
        for job in small:
            until(job, has_ended)
            assert job.result()
        until(large[0], lambda _: jobs.waiting() == 2)
        assert sorted(job.state for job in large) == ["running", "waiting", "waiting"]
        next(job for job in large if job.state is JobState.RUNNING).stop()
        until(large[0], lambda _: jobs.waiting() == 1)
        assert sorted(job.state for job in large) == ["ended", "running", "waiting"]


def test_worker_started_while_all_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, started = Jobs(1, UNLIMITED, keep=True), list[subprocess.Popen[bytes]]()

    def start_late() -> subprocess.Popen[bytes]:
        jobs.close()
        started.append(_worker())
        return started[-1]

    monkeypatch.setattr("app.jobs.job._worker", start_late)
    job = jobs.start("late", TaskRequest(os.getpid))
    until(job, lambda _: bool(started) and started[0].poll() is not None)
    assert job.state is JobState.ENDED


@pytest.mark.slow
def test_a_search_shows_plans_and_can_be_stopped_and_started_again(jobs: Jobs) -> None:
    jobs.warm()
    job = jobs.start("large", searching(LARGE))
    second = jobs.start("second", searching(SMALL))
    until(job, lambda job: job.value is not None)
    assert job.state is JobState.RUNNING
    assert second.state is JobState.WAITING, "one at a time here"
    job.stop()
    until(job, lambda job: job.state is JobState.ENDED)
    assert job.stopped
    assert job.error is None
    assert job.value.interrupted
    assert job.value.ranked
    until(second, lambda job: job.state is JobState.ENDED)
    assert second.value is not None
    assert jobs.start("large", searching(SMALL)) is not job


def test_errors_are_reported_as_problems() -> None:
    told = searching(WRONG).run(lambda _: None)
    assert isinstance(told, Failed)
    assert "dgx-h100" in str(told.error)


@pytest.mark.slow
def test_errors_come_back_as_problems(jobs: Jobs) -> None:
    job = jobs.start("wrong", searching(WRONG))
    until(job, lambda job: job.state is JobState.ENDED)
    assert isinstance(job.error, SpecError)
    assert "dgx-h100" in str(job.error)


def test_time_left_is_an_upper_estimate_from_the_recent_pace() -> None:
    """Rules reject most plans in the first second, 2 plans per second are timed, and bounds prune the rest."""
    pace, total, seen = Pace(), 10_000, []
    for second in range(30):
        left_s = pace.left_s(float(second), 9_000 + 2 * second if second else 0, total)
        if left_s is not None:
            seen.append((second, left_s))
            if second > 8:
                assert left_s == pytest.approx((1_000 - 2 * second) / 2)
    assert seen[0][0] >= 4, "no estimate from the first moments"
    assert pace.left_s(30.0, total, total) == 0
