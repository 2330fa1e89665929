"""Published whole runs: what the report says is what the program finds."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.goodput
from benchmarks.goodput.failures import failure_rows
from benchmarks.goodput.mlperf import LoggedRun, logged_runs, mlperf_rows

REPORT = Path(benchmarks.goodput.__path__[0]).with_name("GOODPUT.md")


@pytest.mark.parametrize("run", logged_runs("llama31_405b"), ids=lambda run: f"{run.system} {run.batch}")
def test_steps_and_evaluations_of_405b_are_its_minutes(run: LoggedRun) -> None:
    """Within 1 %, for each of 16 systems and batches: MLPerf's clock starts after initialization."""
    assert abs(run.error) < 0.01


def test_the_first_405b_run_is_that_of_the_issue() -> None:
    """230.4 of 230.7 min: 240 steps of 55.14 s and 6 evaluations of 98 s."""
    [run] = [run for run in logged_runs("llama31_405b") if run.system == "NVIDIA eos-dfw_n64_ngc25.01_nemo"]
    assert (run.num_steps, run.num_evaluations) == (240, 6)
    assert (run.step_s, run.evaluation_s) == pytest.approx((55.14, 98), rel=0.02)
    assert run.minutes == pytest.approx(230.7, abs=0.05)


def test_report_of_mlperf_is_of_today() -> None:
    text = REPORT.read_text()
    for row in mlperf_rows():
        assert row.to_markdown() in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_report_is_of_today() -> None:
    rows = [*failure_rows()]
    text = REPORT.read_text()
    assert [row.run for row in rows if row.to_markdown() not in text] == []
    llama = next(row for row in rows if row.published == "419")
    assert llama.outcome == "met"
