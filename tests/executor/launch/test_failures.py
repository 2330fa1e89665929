"""Drawn failures on hosts: every set-up of ``benchmarks.failures`` ends with the losses of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.failures import SetUp, outcomes, set_ups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("_hosts_can_be_made")]
TOLERANCE = 1e-9


@pytest.mark.parametrize("set_up", set_ups((1, 1, 1)), ids=lambda set_up: set_up.name)
def test_drawn_failures_change_no_loss(set_up: SetUp, tmp_path: Path) -> None:
    """Goodput of one run says little, so that only ``make failures`` judges it."""
    (outcome,) = outcomes(replace(set_up, num_steps=60), tmp_path)
    measurement, times = outcome.measurement, outcome.measurement.times
    assert measurement.complete
    assert outcome.error <= TOLERANCE
    assert times is not None
    assert sum(times.waterfall_s.values()) == pytest.approx(times.time_s)
    assert outcome.goodput.predicted is not None
    assert outcome.goodput.measured_s.keys() <= {*outcome.goodput.predicted_s, "fewer nodes", "waiting"}
    assert times.stops
