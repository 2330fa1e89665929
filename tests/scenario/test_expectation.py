from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from simplan.program.program import MemoryCategory
from simplan.scenario import METRICS, Expectation, evaluate
from tests.support.problems import says

PREDICTION: dict[str, Any] = {
    "num_trained_parameters": 1000,
    "step_time_s": 1.5,
    "action_level_step_time_s": 1.6,
    "bubble_fraction": 3 / 11,
    "tokens_per_s_per_device": 1000.0,
    "document_tokens_per_s_per_device": 900.0,
    "samples_per_s_per_device": 0.5,
    "mfu": None,
    "mfu_full_attention": 0.42,
    "hfu": 0.4,
    "fits": True,
    "memory_verdict": "may not fit",
    "peak_memory_gib": {"allocated": 10.0, "reserved": 11.0, "device": 12.0},
    "host_memory_gib": {"rank": 1.0, "node": 2.0, "capacity": None},
    "host_fits": True,
    "worst_rank": 3,
    "capacity_gib": 16.0,
    "num_microbatches": 8,
    "ranks": [
        {"rank": 2, "activations_in_flight": {"0": 4}, "memory_gib": {}},
        {"rank": 3, "activations_in_flight": {"1": 3}, "memory_gib": {str(c): 0.5 for c in MemoryCategory}},
    ],
}


@pytest.mark.parametrize(
    ("expectation", "passed"),
    [
        ({"metric": "step_time_s", "value": 1.5}, True),
        ({"metric": "step_time_s", "value": 1.5000001}, False),
        ({"metric": "step_time_s", "value": 1.4, "rel_tol": 0.08}, True),
        ({"metric": "step_time_s", "value": 1.4, "rel_tol": 0.07}, False),
        ({"metric": "step_time_s", "value": 1.4, "abs_tol": 0.11}, True),
        ({"metric": "step_time_s", "value": 1.4, "abs_tol": 0.09}, False),
        ({"metric": "step_time_s", "value": 1.4, "abs_tol": 0.09, "rel_tol": 0.08}, True),
        ({"metric": "step_time_s", "value": 2, "rel_tol": 0.25}, True),
        ({"metric": "peak_memory_gib", "max": 12}, True),
        ({"metric": "peak_memory_gib", "max": 11.9}, False),
        ({"metric": "peak_reserved_gib", "min": 11, "max": 11}, True),
        ({"metric": "peak_allocated_gib", "min": 10.1}, False),
        ({"metric": "fits", "value": True}, True),
        ({"metric": "fits", "value": False}, False),
        ({"metric": "fits_safely", "value": False}, True),
        ({"metric": "activations_in_flight", "value": 4}, True),
        ({"metric": "worst_rank", "value": 3}, True),
        ({"metric": "mfu", "min": 0}, False),
    ],
)
def test_evaluation(expectation: dict[str, Any], passed: bool) -> None:
    assert evaluate(Expectation.model_validate(expectation), PREDICTION).passed is passed


@pytest.mark.parametrize(
    ("fields", "passed", "rule"),
    [
        ({"max": 1.45, "rel_tol": 0.05}, True, "at most 1.45 + 5 %"),
        ({"max": 1.4, "rel_tol": 0.05}, False, "at most 1.4 + 5 %"),
        ({"max": 9.0, "rel_tol": 0.05}, True, "at most 9 + 5 %"),
        ({"min": 1.55, "abs_tol": 0.1}, True, "at least 1.55 - 0.1"),
        ({"min": 1.65, "abs_tol": 0.1}, False, "at least 1.65 - 0.1"),
    ],
)
def test_a_bound_with_a_tolerance_is_one_sided(fields: dict[str, Any], passed: bool, rule: str) -> None:
    result = evaluate(Expectation.model_validate({"metric": "step_time_s", **fields}), PREDICTION)
    assert (result.passed, result.message) == (passed, f"step_time_s is 1.5 s, expected {rule}")


def test_messages() -> None:
    def message(**fields: Any) -> str:
        return evaluate(Expectation.model_validate(fields), PREDICTION).message

    assert message(metric="step_time_s", value=1.4, rel_tol=0.1) == "step_time_s is 1.5 s, expected 1.4 within 10 %"
    assert says(message(metric="peak_memory_gib", min=1, max=8), "peak_memory_gib", "12 GiB", "least 1", "most 8")
    assert says(message(metric="fits", value=False), "fits is true", "rank 3", "12.00 GiB", "16.00 GiB", "false")
    assert message(metric="mfu", min=0.4) == "mfu is unknown, expected at least 0.4"


def test_every_metric_reads_a_prediction() -> None:
    for name, metric in METRICS.items():
        assert metric.definition
        assert (
            metric.read(PREDICTION) is not None
            or metric.is_of_run
            or name
            in (
                "mfu",
                "background_s",
                "contention_s",
                "slowest_link_gib",
                "gradients_sent_gib",
                "round_s",
                "outer_exposed_s",
                "outer_sent_gib",
                "updates_per_s",
                "staleness_mean",
                "staleness_p90",
                "pushed_gib",
                "held_s",
            )
        )


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"metric": "mfu"}, "needs either value, or min or max or both"),
        ({"metric": "mfu", "value": 1, "max": 1}, "needs either value"),
        ({"metric": "mfu", "min": 0, "max": 1, "rel_tol": 0.1}, "rel_tol and abs_tol go with value, min or max"),
        ({"metric": "mfu", "min": 2, "max": 1}, "min = 2 must be at most max = 1"),
        ({"metric": "mfu", "value": True}, "fits needs value: true or false"),
        ({"metric": "fits", "value": 1}, "fits needs value: true or false"),
        ({"metric": "mfu", "value": "1"}, "must be a finite number, true or false"),
        ({"metric": "mfu", "value": float("nan")}, "must be a finite number"),
        ({"metric": 3, "value": 1}, "is not a known metric"),
        ({"metric": "mfu", "value": 1, "rel_tol": -1}, "greater than or equal to 0"),
    ],
)
def test_contradictory_expectations_are_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        Expectation.model_validate(fields)
