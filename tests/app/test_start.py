"""The first page: its plan is near the best that a search finds, and the page says by how much it is better."""

from __future__ import annotations

import re

import pytest

from app.fitting import document_text
from app.state import START, USUAL
from simplan.job import Job
from simplan.predict import predict
from simplan.scenario import parse_scenario
from simplan.search import search
from tests.app.views.pages import assert_no_bug, opened


def job_of(document: dict[str, object]) -> Job:
    return parse_scenario(document_text(document)).job


@pytest.mark.slow
def test_session_starts_within_a_percent_of_the_best_plan_of_its_job() -> None:
    result = search(job_of(START), {"top": 1}, explain=False)
    assert result.best is not None
    assert predict(job_of(START)).step_time_s < 1.01 * result.best.step_time_s


def test_first_page_says_what_its_plan_is_better_than() -> None:
    page = opened(document=START)
    assert_no_bug(page)
    best, usual = (predict(job_of(document)) for document in (START, USUAL))
    [words] = [caption.value for caption in page.caption if "best plan that Search finds" in caption.value]
    [percent] = re.findall(r" (\d+) % faster than ", words)
    assert abs(usual.step_time_s / best.step_time_s - 1 - int(percent) / 100) < 0.01
    page.number_input(key="document:training.global_batch_size").set_value(64).run()
    assert not [caption for caption in page.caption if "best plan that" in caption.value], (
        "another job has another best plan"
    )
