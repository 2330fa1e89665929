"""The arithmetic of a suite's report, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.report.suite import suite_markdown, suite_summary
from simplan.validate.suite import Suite, SuiteCase, case_of_rehearsal, case_of_run, errors_of

GIB = 1024**3


def case(name: str, predicted_s: float, measured_s: float, **fields: Any) -> SuiteCase:
    numbers = {"predicted_step_time_s": predicted_s, "measured_step_time_s": measured_s}
    return SuiteCase(**{"name": name, "digest": "0", "kind": "run", **numbers, **fields})


CASES = (
    case("a", 1.1, 1.0, predicted_allocated_bytes=2 * GIB, measured_allocated_bytes=2 * GIB, mfu=0.4, spread=0.01),
    case("b", 0.6, 0.8, predicted_allocated_bytes=3 * GIB, measured_allocated_bytes=4 * GIB),
    SuiteCase(name="c", digest="0", kind="run", failure="rank 0 needs more memory than this device has"),
    case("d", 2.0, 1.0, kind="rehearsal"),
)


def test_errors_are_signed_and_the_worst_is_named() -> None:
    errors = errors_of(CASES[:3], "step_time")
    assert errors is not None
    assert (errors.num, errors.worst_case) == (2, "b")
    assert errors.mean_absolute == pytest.approx((0.1 + 0.25) / 2)
    assert errors.bias == pytest.approx((0.1 - 0.25) / 2)
    assert errors.worst == pytest.approx(-0.25)
    memory = errors_of(CASES, "memory")
    assert memory is not None
    assert (memory.num, memory.worst) == (2, -0.25)
    assert errors_of(CASES[2:3], "step_time") is None


def test_the_report_says_what_was_measured_and_what_was_not() -> None:
    suite = Suite(environment={"device": "NVIDIA H200", "torch": "2.13"}, cases=CASES, not_reached=("e",))
    text = suite_markdown(suite)
    values = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["step time, runs", "2", "17.5 %", "-7.5 %", "-25.0 %", "`b`"] in values
    assert ["step time, rehearsals", "1", "100.0 %", "+100.0 %", "+100.0 %", "`d`"] in values
    assert [*["`a`", "1.000 s", "1.100 s", "+10.0 %", "1.0 %", "40.0 %", "2.00 GiB", "2.00 GiB", "+0.0 %"]] in values
    assert "- `c`: rank 0 needs more memory than this device has" in text
    assert "- `e`: no time was left" in text
    assert suite_summary(suite).splitlines()[-2:] == ["1 failed", "1 not reached in time; the same command continues"]
    written = suite.to_json()
    assert written["overall"]["run"]["step_time"]["worst_case"] == "b"
    assert written["overall"]["rehearsal"]["memory"] is None
    assert written["cases"][1]["error"]["memory"] == -0.25


def test_an_empty_suite_is_a_report_too() -> None:
    assert suite_summary(Suite()) == "nothing was measured"
    assert suite_markdown(Suite()).startswith("# Predicted against measured")


def test_a_run_is_compared_on_the_rank_that_needs_most() -> None:
    prediction = {
        "step_time_s": 2.0,
        "mfu": 0.5,
        "ranks": [{"rank": rank, "peak_memory_gib": {"allocated": float(rank + 1)}} for rank in range(2)],
    }
    ranks = [{"rank": rank, "peak_memory": {"allocated_bytes": (3 - rank) * GIB}} for rank in range(2)]
    measurement = {"step_time_s": 4.0, "spread": 0.02, "ranks": ranks}
    case = case_of_run("x", "0", {"prediction": prediction, "measurement": measurement})
    assert case.mfu == pytest.approx(0.25)
    assert (case.predicted_allocated_bytes, case.measured_allocated_bytes) == (GIB, 3 * GIB)
    assert case.error("step_time") == -0.5


def test_a_rehearsal_without_a_device_has_memory_only() -> None:
    peaks = [{"name": "allocated", "predicted_bytes": 10, "measured_bytes": 8}]
    comparison = {"rehearsed": None, "predicted_step_time_s": 1.0, "peaks": peaks}
    case = case_of_rehearsal("x", "0", {"comparison": comparison})
    assert case.error("step_time") is None
    assert case.error("memory") == 0.25
