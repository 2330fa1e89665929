"""Pipelines of captured modules on real ranks: against one process, and against the Program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor.run import run_job
from simplan.validate.compare import issued_as_predicted
from tests.executor.capture.test_running import assert_equal_to_one_process, job_of, prediction_of
from tests.executor.conftest import slow_except
from tests.executor.train.test_equality import run_in_float64

_1F1B: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}
_FOUR: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "stage_layers": (0, 1, 1, 1)}
PLANS: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": _1F1B,
    "early": _1F1B | {"stage_layers": (0, 1)},
    "interleaved": _FOUR | {"schedule": "interleaved_1f1b"},
    "ddp": _1F1B | {"dp_replicate": 2},
    "zero1": _1F1B | {"dp_shard": 2, "zero_stage": 1},
    "zero3": _1F1B | {"dp_shard": 2},
    "recomputed": _1F1B | {"recompute": "full"},
    "zb-h1": _1F1B | {"schedule": "zb-h1"},
    "zb-v": _FOUR | {"schedule": "zb-v"},
}
CASES = [
    ("UNet", "early"),
    ("Recommender", "early"),
    *(("DiT", plan) for plan in PLANS if plan != "early"),
    ("AdaptedDiT", "1f1b"),
    ("AdaptedDiT", "zero3"),
    ("Scaled", "ddp"),
    ("StateSpaceModel", "1f1b"),
    ("StateSpaceModel", "zero1"),
]


@pytest.mark.parametrize(("name", "plan"), slow_except([("StateSpaceModel", "1f1b")], CASES))
def test_pipelines_equal_one_process(name: str, plan: str, tmp_path: Path) -> None:
    """Losses and all gradients."""
    job = job_of(prediction_of(name, PLANS[plan]), dtype="fp64")
    run = run_in_float64(job, tmp_path)
    assert_equal_to_one_process(job, run.measurement.losses, tmp_path)


@pytest.mark.parametrize(("name", "plan"), slow_except([("DiT", "zero3")], CASES))
def test_pipelines_issue_what_is_predicted(name: str, plan: str, tmp_path: Path) -> None:
    """Tensors between stages, their gradients, and all collectives: kinds, groups, bytes and order."""
    assert issued_as_predicted(run_job(job_of(prediction_of(name, PLANS[plan])), tmp_path))
