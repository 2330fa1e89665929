"""Runs that never finish, and the changes with which they would."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simplan.goodput.endless import endless
from simplan.goodput.setup import CauseSetup, RunSetup, Size

RUN = RunSetup(
    num_steps=100_000,
    sizes=(Size(num_nodes=4, step_s=10.0),),
    devices_per_node=8,
    checkpoint_every=60,
    blocking_s=30.0,
    load_s=20.0,
    restart_s=600.0,
    causes=(CauseSetup(name="node", units_per_node=1, mtbf_s=4 * 7200.0),),
)


def failing_every(seconds: float, run: RunSetup = RUN) -> RunSetup:
    return replace(run, causes=(replace(run.causes[0], mtbf_s=4 * seconds),))


def test_run_that_gets_on_is_not_endless() -> None:
    assert endless(RUN) is None
    assert endless(replace(RUN, causes=())) is None


def test_mean_time_below_restart_and_checkpoint_is_endless_and_just_above_is_not() -> None:
    needed_s = RUN.restart_s + RUN.load_s + RUN.blocking_s
    assert endless(failing_every(1.001 * needed_s)) is None
    reason = endless(failing_every(0.5 * needed_s))
    assert reason is not None
    assert reason.between_stops_s == pytest.approx(needed_s / 2)
    assert reason.factor is not None
    assert reason.factor == pytest.approx(2.0, rel=1e-6), "rule: mean time to failure = restart + load + checkpoint"
    assert endless(failing_every(0.5 * needed_s * reason.factor * 1.001)) is None


def test_each_change_alone_lets_the_run_finish_and_less_does_not() -> None:
    run = failing_every(500.0)
    reason = endless(run)
    assert reason is not None
    assert reason.saved_restart_s is not None
    enough_s = run.restart_s - reason.saved_restart_s
    assert enough_s == pytest.approx(500.0 - run.load_s - run.blocking_s)
    assert endless(replace(run, restart_s=0.999 * enough_s)) is None
    assert endless(replace(run, restart_s=1.001 * enough_s)) is not None
    assert reason.shorter_interval_s is None, "a shorter interval does not shorten the restart"


def test_interval_too_long_for_the_failures_is_endless_until_it_is_shorter() -> None:
    run = replace(RUN, checkpoint_every=10_000)  # 27.8 h of work between failures every 2 h
    reason = endless(run)
    assert reason is not None
    assert reason.shorter_interval_s is not None
    every = int(reason.shorter_interval_s / run.step_s)
    assert endless(replace(run, checkpoint_every=every)) is None
    expected = math.exp(620 / 7200) * 7200 * math.expm1((every * 10 + 30) / 7200) / (every * 10 + 30)
    assert expected == pytest.approx(100, rel=0.01), "Daly's expected time over that without failures"


def test_run_without_checkpoints_loses_all_work_and_is_endless_if_it_is_long() -> None:
    long = replace(RUN, checkpoint_every=0)
    assert endless(long) is not None
    assert endless(replace(long, num_steps=500)) is None
    window = replace(long, causes=(), maintenance_every_s=3600.0 * 24, maintenance_s=3600.0)
    assert endless(window) is not None
    assert endless(replace(window, num_steps=1000)) is None


def test_preemptions_are_blamed_where_they_are_most_stops() -> None:
    reason = endless(replace(RUN, preemption_mtbf_s=4 * 300.0))
    assert reason is not None
    assert reason.by_preemptions
    assert reason.factor is not None
    assert endless(replace(RUN, preemption_mtbf_s=4 * 300.0 * reason.factor * 1.001)) is None


def test_group_that_leaves_needs_no_restart() -> None:
    sizes = (Size(num_nodes=4, step_s=10.0), Size(num_nodes=2, step_s=10.0, advance=0.5))
    run = replace(failing_every(500.0), policy="continue", sizes=sizes, group_nodes=2, reconfigure_s=30.0)
    assert endless(run) is None


def test_corruption_that_is_found_after_all_kept_checkpoints_is_endless_if_it_is_frequent() -> None:
    run = replace(RUN, causes=(), corruption_mtbf_s=32 * 36_000.0, corruption_found_s=36_000.0)
    assert endless(run) is None
    assert endless(replace(run, keep=2)) is not None, "all work is lost every 10 hours"
    assert endless(replace(run, keep=100)) is None
