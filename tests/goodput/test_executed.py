"""Faults of executed runs: those that the simulation draws, and goodput that follows from measured restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplan.goodput.executed import (
    RecoveryTimes,
    causes_like,
    drawn_faults,
    expected_run,
    scaled,
    with_preemptions,
    with_recovery,
)
from simplan.goodput.setup import CauseSetup, RunSetup, Size
from simplan.runs.faults import Fault, MeasuredStop, RunTimes
from tests.support.problems import refuses

RANK = CauseSetup(name="rank", units_per_node=0, mtbf_s=40.0, num_nodes=0)
NODE = CauseSetup(name="node", units_per_node=1, mtbf_s=200.0, num_nodes=1, repair_s=30.0)


def setup(*causes: CauseSetup, **fields: Any) -> RunSetup:
    sizes = (Size(num_nodes=3, step_s=0.2),)
    values = {"num_steps": 1000, "sizes": sizes, "devices_per_node": 2, "checkpoint_every": 50, "blocking_s": 0.5}
    return RunSetup(**{**values, "restart_s": 10.0, "causes": causes, **fields})


def test_faults_are_a_poisson_process_of_the_age_whatever_restarts_take() -> None:
    """8000 s of steps and more: the mean of 100 times between faults is within four standard errors."""
    faults = drawn_faults(setup(RANK, num_steps=4000), seed=3, ranks_per_node=2)
    times_s = [fault.at_s for fault in faults if fault.at_s is not None]
    assert times_s == sorted(times_s)
    assert times_s[99] / 100 == pytest.approx(RANK.mtbf_s, rel=0.4)
    quick = drawn_faults(setup(RANK, num_steps=4000, restart_s=1.0), seed=3, ranks_per_node=2)
    assert [fault.at_s for fault in quick[:50]] == pytest.approx(times_s[:50])
    assert {fault.rank for fault in faults} == set(range(6))


def test_kinds_follow_the_causes() -> None:
    hangs = replace(RANK, name="hang", timeout=1.0)
    planned = replace(NODE, name="planned", planned=True)
    faults = drawn_faults(setup(NODE, hangs, planned, timeout_s=60.0, notice_s=7.0), seed=1, ranks_per_node=2)
    by_kind = {fault.kind: fault for fault in faults}
    assert by_kind.keys() == {"kill", "stop", "preempt"}
    assert {fault.node for fault in faults if fault.kind == "kill"} == {1, 2}, "node 0 has the store"
    assert (by_kind["kill"].for_s, by_kind["preempt"].notice_s, by_kind["stop"].node) == (30.0, 7.0, None)


def test_a_node_alone_has_ranks_to_lose() -> None:
    alone = setup(NODE, sizes=(Size(num_nodes=1, step_s=0.2),))
    assert {fault.rank for fault in drawn_faults(alone, seed=1, ranks_per_node=2)} == {0, 1}


def test_a_scale_divides_all_times_but_steps() -> None:
    faster = scaled(setup(NODE, notice_s=60.0, spot_wait_s=100.0, preemption_mtbf_s=500.0), 10.0)
    assert (faster.step_s, faster.restart_s, faster.blocking_s, faster.notice_s) == (0.2, 1.0, 0.05, 6.0)
    assert (faster.causes[0].mtbf_s, faster.causes[0].repair_s) == (20.0, 3.0)
    assert faster.takeover_s == faster.corruption_mtbf_s == float("inf")
    spot = with_preemptions(faster)
    assert (spot.causes[1].mtbf_s, spot.causes[1].repair_s, spot.causes[1].planned) == (50.0, 10.0, True)
    assert spot.preemption_mtbf_s == float("inf")


def test_causes_of_a_schedule_have_its_rate() -> None:
    kill = Fault(kind="kill", at_step=10, rank=1)
    slow = Fault(kind="slow", at_step=30, rank=1, slowdown=2.0, for_s=1.0)
    (cause,) = causes_like([kill, slow, kill.with_changes(at_step=20)], 100.0)
    assert (cause.mtbf_s, cause.num_nodes, cause.timeout) == (50.0, 0, 0.0)


def stop(kind: str = "kill", **fields: Any) -> MeasuredStop:
    values = {"at_s": 30.0, "detection_s": 1.0, "waiting_s": 2.0, "restart_s": 9.0, "num_nodes": 3}
    return MeasuredStop(kind=kind, **{**values, **fields})  # type: ignore[arg-type]


def times(*stops: MeasuredStop, **fields: Any) -> RunTimes:
    values = {"initialization_s": 5.0, "time_s": 60.0, "waterfall_s": {"compute": 30.0}, "checkpoint_s": 0.4}
    return RunTimes(**{**values, "step_s": {3: 0.3}, "stops": stops, **fields})


def test_times_of_an_earlier_run_replace_those_of_the_setup() -> None:
    lost = stop(node=True, num_nodes=2)
    joined = stop("nodes", at_s=63.0, restart_s=11.0)
    recovery = RecoveryTimes.of(times(lost, joined), 60.0, returns_after_s=40.0)
    assert recovery.return_s == pytest.approx(63.0 - 33.0 - 40.0), "it joins before its repair is over in the numbers"
    shrinking = setup(replace(NODE, repair_s=40.0), sizes=(Size(num_nodes=3, step_s=1), Size(num_nodes=2, step_s=2)))
    recovered = with_recovery(replace(shrinking, policy="shrink", timeout_s=20.0), recovery)
    assert [size.step_s for size in recovered.sizes] == [0.3, 2]
    assert recovered.causes[0].repair_s == pytest.approx(30.0)
    assert (recovered.detection_s, recovered.timeout_s, recovered.diagnosis_s) == (1.0, 20.0, 2.0)
    assert (recovered.restart_s, recovered.blocking_s) == (10.0, 0.4)


def test_a_hang_takes_the_timeout_of_the_run_that_is_predicted() -> None:
    recovery = RecoveryTimes.of(times(stop(), stop("stop", detection_s=61.5)), 60.0)
    assert with_recovery(setup(RANK, timeout_s=20.0), recovery).timeout_s == pytest.approx(21.5)
    assert recovery.detection_s == 1.0


@pytest.mark.parametrize(
    ("without", "lacks"),
    [(times(), "restart"), (times(stop("nodes")), "restart"), (times(stop(), checkpoint_s=None), "checkpoint")],
)
def test_a_run_without_a_restart_or_checkpoint_says_nothing(without: RunTimes, lacks: str) -> None:
    with refuses("--recovery", rule=f"without a {lacks}"):
        RecoveryTimes.of(without, 60.0)


def test_expected_goodput_is_that_of_simulated_runs() -> None:
    expected = expected_run(setup(RANK), seed=1, num_runs=50)
    low, middle, high = expected.goodput
    assert 0 < low < middle < high < 1
    assert sum(expected.waterfall_s.values()) == pytest.approx(expected.time_s)
    assert expected.waterfall_s["compute"] == pytest.approx(200.0)
    certain = expected_run(setup(), seed=1, num_runs=3)
    assert certain.goodput == pytest.approx((200 / 210,) * 3), "200 s of steps, 20 checkpoints of 0.5 s"
