"""Step times from profiled stage times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simplan.accuracy.profiled import StageProfile, predict_from_profiles, profiled_step_s, read_profiles
from simplan.scenario.published.reading import read_published
from tests.support.problems import refuses

PUBLISHED = Path(__file__).resolve().parents[2] / "scenarios" / "published"
PROFILE = StageProfile(
    id="p",
    source="a test",
    model="small",
    pp=4,
    num_microbatches=12,
    run_ids={},
    t_f_ms=10.0,
    t_b_ms=12.0,
    t_w_ms=8.0,
    t_comm_ms=0.0,
)


def test_with_free_messages_1f1b_has_its_closed_form() -> None:
    assert profiled_step_s(PROFILE, "1f1b", 1, 0.0, 1.0) == pytest.approx((12 + 4 - 1) * 0.030)
    assert profiled_step_s(PROFILE, "interleaved_1f1b", 3, 0.0, 1.0) == pytest.approx((3 * 12 + 4 - 1) * 0.010)
    slower = profiled_step_s(PROFILE, "1f1b", 1, 0.001, 1.1)
    assert slower == pytest.approx((12 + 4 - 1) * (1.1 * 0.030 + 2 * 0.001)), "a start for each of F and B"


def test_the_runs_that_were_profiled_are_predicted_to_1_5_percent() -> None:
    outcomes = predict_from_profiles(
        read_published([PUBLISHED / "zero_bubble.yaml"]), read_profiles(PUBLISHED / "zero_bubble_profiles.yaml")
    )
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert len(errors) == 18
    assert np.abs(errors).mean() < 0.015
    assert {outcome.reason for outcome in outcomes if outcome.predicted is None} == {"has no profiled stage times"}


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("meta: {source: x}\nrecords: []\n")
    with refuses("profiled_stage_times", rule="is missing", fix="name a file of profiled"):
        read_profiles(file)
