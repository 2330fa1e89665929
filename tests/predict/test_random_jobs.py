"""Random jobs of the catalog are predicted within a budget of operations and of memory."""

from __future__ import annotations

from typing import get_args

import pytest

from benchmarks.job_draw import SOFTWARE_OPTIONS, random_scenario
from benchmarks.random_jobs import measured
from simplan.software.software import SoftwareOption

_NUM_JOBS = 200
_MOST_OPERATIONS, _MOST_BYTES = 1_200_000, 2**30


def test_a_seed_draws_one_job() -> None:
    jobs = [random_scenario(seed)[1].job for seed in (0, 1, 0)]
    assert jobs[0] == jobs[2] != jobs[1]


def test_every_option_of_software_is_drawn() -> None:
    assert SOFTWARE_OPTIONS.keys() == {*get_args(SoftwareOption)}


@pytest.mark.slow
def test_random_jobs_need_few_operations_and_little_memory() -> None:
    costs = [*measured(range(_NUM_JOBS))]
    assert [cost.seed for cost in costs] == [*range(_NUM_JOBS)]
    wrong = [
        f"{cost.words}\n{cost.error}"
        for cost in costs
        if cost.error or cost.ended or cost.num_operations > _MOST_OPERATIONS or cost.peak_bytes > _MOST_BYTES
    ]
    assert not wrong, "\n".join(wrong)
