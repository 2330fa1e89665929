"""A search for each family of models gives a plan that ``predict`` confirms, and says what limits it."""

from __future__ import annotations

import math

import pytest

from simplan.predict import predict
from simplan.search import SearchSpace, search
from tests.search.jobs import FAMILIES, small_job


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_predict_confirms_the_best_plan(family: str) -> None:
    precision = "fp32" if family == "resnet" else "bf16"
    asked = small_job(family, 4, batch=4, precision=precision)
    space = SearchSpace(top=1, microbatch_size=(1,), recompute=("none",), virtual_stages=(1, 2))
    result = search(asked, space)
    best = result.best
    assert best is not None
    one = predict(asked.with_plan(best.plan), name="x")
    assert best.step_time_s == pytest.approx(one.step_time_s, rel=1e-9)
    assert best.device_bytes == one.worst_memory.device_bytes
    assert best.headroom_bytes == one.job.cluster.device.memory_bytes - best.device_bytes  # type: ignore[operator]
    per_step = one.samples_per_s_per_device if result.unit == "images" else one.tokens_per_s_per_device
    assert best.tokens_per_s_per_device == pytest.approx(per_step)
    why = best.explanation
    assert why is not None
    assert math.fsum(why.shares.values()) == pytest.approx(1)
    assert why.step_time_interval_s == one.step_time_interval_s
    assert all(0 < share < 1 / 11 + 1e-9 for name, share in why.saved.items() if name != "memory"), (
        "10 % more of one thing saves at most an eleventh"
    )
