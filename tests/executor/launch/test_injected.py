"""Runs that meet faults of a schedule go on from the newest checkpoint, and say where their time went."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.runs.faults import Fault
from simplan.validate.goodput import GoodputComparison
from tests.executor.conftest import make_job
from tests.executor.launch.apart import run_apart
from tests.executor.launch.test_faults import wait_until_gone
from tests.executor.train.test_checkpoints import undisturbed, with_checkpoints
from tests.support.problems import says

NUM_STEPS = 20
KILL = Fault(kind="kill", at_step=7, rank=1)


@pytest.mark.slow
def test_a_run_meets_a_fault_and_accounts_for_its_time(tmp_path: Path) -> None:
    job = make_job(dp=2, dtype="fp64")
    whole = undisturbed(job, tmp_path / "whole", NUM_STEPS)
    hit = with_checkpoints(job, tmp_path / "kept", NUM_STEPS, every=5, max_restarts=1)
    measurement = run_apart(hit.model_copy(update={"faults": (KILL,)}), tmp_path / "out")
    wait_until_gone(tmp_path)
    assert measurement.losses == pytest.approx(whole.losses, rel=1e-9)
    times = measurement.times
    assert times is not None
    assert times.interruptions == {"kill": 1}
    assert sum(times.waterfall_s.values()) == pytest.approx(times.time_s)
    assert all(times.waterfall_s[part] > 0 for part in ("compute", "checkpoint", "lost_work", "restart"))
    assert times.stops[0].at_s + times.stops[0].restart_s < times.time_s
    assert times.waterfall_s["restart"] == pytest.approx(times.stops[0].restart_s)
    compared = GoodputComparison.of(measurement)
    assert compared is not None
    assert (compared.measured, compared.predicted) == (times.goodput, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (KILL.with_changes(kind="stop"), "1 ... 10"),
        (KILL.with_changes(kind="preempt", notice_s=60.0), "rank "),  # the one that was told, or its peer
        (KILL.with_changes(at_step=None, at_s=0.0), "rank 1 was killed"),
    ],
    ids=["stop", "preempt", "at-once"],
)
def test_every_kind_of_fault_is_survived(fault: Fault, said: str, tmp_path: Path) -> None:
    job = make_job(dp=2, dtype="fp64", timeout_s=10.0)
    whole = undisturbed(job, tmp_path / "whole", NUM_STEPS)
    hit = with_checkpoints(job, tmp_path / "kept", NUM_STEPS, every=5, max_restarts=1)
    measurement = run_apart(hit.model_copy(update={"faults": (fault,)}), tmp_path / "out")
    assert measurement.losses == pytest.approx(whole.losses, rel=1e-9)
    assert measurement.times is not None
    assert measurement.times.interruptions == {fault.kind: 1}
    assert says(measurement.notes[0], said)


@pytest.mark.slow
def test_a_slow_rank_holds_up_the_steps_beside_it(tmp_path: Path) -> None:
    slow = Fault(kind="slow", at_step=100, rank=1, slowdown=20.0, for_s=5.0)
    job = with_checkpoints(make_job(dp=2), tmp_path / "kept", 300, every=300, max_restarts=1)
    measurement = run_apart(job.model_copy(update={"faults": (slow,)}), tmp_path / "out")
    assert measurement.times is not None
    assert measurement.times.stops == ()
    assert measurement.times.waterfall_s["slow_device"] > 1.0
