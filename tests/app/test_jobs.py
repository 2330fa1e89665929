"""Work in processes of its own: answers, stops, refusals; real workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from app.figures.plans import Pace, search_plans
from app.jobs.job import Failed, Jobs, StartedJob, State, TaskRequest
from simplan.errors import SpecError
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


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    found = Jobs(max_running=1)
    yield found
    found.close()


def searching(text: str) -> TaskRequest:
    return TaskRequest(search_plans, (text,), reports_progress=True)


def until(job: StartedJob, holds: Callable[[StartedJob], bool]) -> None:
    deadline_s = time.monotonic() + 600
    while not holds(job):
        assert time.monotonic() < deadline_s
        job.watch()
        time.sleep(0.02)


def test_a_worker_finds_what_search_finds(jobs: Jobs) -> None:
    jobs.warm()
    job = jobs.start("small", searching(SMALL))
    assert jobs.start("small", searching(SMALL)) is job, "equal questions are asked once"
    until(job, lambda job: job.state is State.ENDED)
    asked = parse_search(SMALL)
    alone = search(asked.job, asked.space)
    assert isinstance(job.value, SearchResult)
    assert (job.value.ranked, job.value.pareto) == (alone.ranked, alone.pareto)
    assert jobs.start("small", searching(SMALL)) is job, "an answer is kept"


@pytest.mark.slow
def test_a_search_shows_plans_and_can_be_stopped_and_started_again(jobs: Jobs) -> None:
    jobs.warm()
    job = jobs.start("large", searching(LARGE))
    second = jobs.start("second", searching(SMALL))
    until(job, lambda job: job.value is not None)
    assert job.state is State.RUNNING
    assert second.state is State.WAITING, "one at a time here"
    job.stop()
    until(job, lambda job: job.state is State.ENDED)
    assert job.stopped
    assert job.error is None
    assert job.value.interrupted
    assert job.value.ranked
    until(second, lambda job: job.state is State.ENDED)
    assert second.value is not None
    assert jobs.start("large", searching(SMALL)) is not job


def test_what_is_wrong_is_told_as_problems() -> None:
    told = searching(WRONG).run(lambda _: None)
    assert isinstance(told, Failed)
    assert "dgx-h100" in str(told.error)


@pytest.mark.slow
def test_what_is_wrong_comes_back_as_problems(jobs: Jobs) -> None:
    job = jobs.start("wrong", searching(WRONG))
    until(job, lambda job: job.state is State.ENDED)
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
