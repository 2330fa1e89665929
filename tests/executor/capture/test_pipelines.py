"""Pipelines of captured modules on real ranks: against one process, and against the Program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.run import run_job
from simplan.validate.compare import issued_as_predicted
from tests.executor.capture.test_running import assert_equal_to_one_process, job_of, prediction_of
from tests.executor.conftest import slow_except
from tests.executor.train.test_equality import run_in_float64

PLANS: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "interleaved": {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "ddp": {"pp": 2, "schedule": "1f1b", "dp_replicate": 2},
    "zero1": {"pp": 2, "schedule": "1f1b", "dp_shard": 2, "zero_stage": 1},
    "zero3": {"pp": 2, "schedule": "1f1b", "dp_shard": 2},
    "recomputed": {"pp": 2, "schedule": "1f1b", "recompute": "full"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-v": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2},
}
NAMES = ("UNet", "DiT", "AdaptedDiT", "Scaled", "StateSpaceModel", "Recommender")
CASES = [(name, plan) for name in NAMES for plan in PLANS]


@pytest.mark.parametrize(("name", "plan"), slow_except([("UNet", "1f1b")], CASES))
def test_pipelines_equal_one_process(name: str, plan: str, tmp_path: Path) -> None:
    """Losses and all gradients."""
    job = job_of(prediction_of(name, PLANS[plan]), dtype="fp64")
    run = run_in_float64(job, tmp_path)
    assert issued_as_predicted(run.measurement)
    assert_equal_to_one_process(job, run.measurement.losses, tmp_path)
