"""The steady part of step times with a known beginning."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.launch.rank import RankFiles
from executor.profiling.recorder import StepRecord
from executor.profiling.results import RunSegment, gather, written_here
from executor.profiling.steps import MIN_STEADY_STEPS, steady_from
from simplan.program.run_spec import RunSpec
from tests.executor.conftest import MakeJob


def write_steps(job: RunSpec, times_s: list[float], folder: Path) -> None:
    """What a rank of a run would have written."""
    lines = []
    for step, time_s in enumerate(times_s):
        start_s = 100.0 * step
        record = StepRecord(step=step, start_s=start_s, end_s=start_s + time_s, losses=(1.0,), spans=(), collectives=())
        lines.append(record.model_dump_json() + "\n")
    assert len(lines) == job.num_all_steps
    RankFiles(folder, 0).steps.write_text("".join(lines))


def noisy(seed: int, num_steps: int) -> list[float]:
    draw = random.Random(seed)
    return [1.0 + draw.gauss(0.0, 0.01) for _ in range(num_steps)]


@pytest.mark.parametrize("slow", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_slow_first_steps_are_left_out(slow: int, seed: int) -> None:
    """With a hundredth of noise, MSER leaves out all of the slow steps, and few others."""
    times = [2.0, 1.6, 1.5, 1.4, 1.35, 1.3, 1.2][:slow] + noisy(seed, 20)
    assert slow <= steady_from(times) <= slow + 8


def test_a_slow_step_in_the_second_half_counts() -> None:
    times = [1.0] * 20
    times[15] = 3.0
    assert steady_from(times) <= 10
    assert len(times) - steady_from(times) >= MIN_STEADY_STEPS


@given(st.lists(st.floats(1e-4, 1e3), max_size=40))
def test_no_less_than_half_and_five_steps_count(times: list[float]) -> None:
    found = steady_from(times)
    assert 0 <= found <= len(times) // 2
    assert len(times) - found >= min(len(times), MIN_STEADY_STEPS)


def test_a_run_without_a_number_of_warmup_steps_finds_them(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(num_steps=6, num_warmup_steps=None)
    assert job.num_all_steps == 6 + MIN_STEADY_STEPS
    write_steps(job, [9.0, 5.0, *noisy(0, 9)], tmp_path)
    found = gather([RunSegment(job)], written_here(tmp_path, 1))
    assert found.warmup_step_times_s[:2] == (9.0, 5.0)
    assert len(found.step_times_s) >= MIN_STEADY_STEPS
    assert found.step_time_s == pytest.approx(1.0, abs=0.03)
    assert len(found.warmup_step_times_s) + len(found.step_times_s) == 11
