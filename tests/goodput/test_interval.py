"""The best checkpoint interval, against Young's and Daly's optimum and against simulated runs at them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simplan.goodput.engines.simulate import simulate
from simplan.goodput.interval import interval_curve
from simplan.goodput.rates import mtbf_s
from simplan.goodput.setup import CauseSetup, RunSetup, Size

NODES, MTBF_S, BLOCKING_S = 8, 6 * 3600.0, 30.0
SETUP = RunSetup(
    num_steps=60_000,
    sizes=(Size(num_nodes=NODES, step_s=20.0),),
    devices_per_node=1,
    checkpoint_every=1,
    blocking_s=BLOCKING_S,
    restart_s=120.0,
    causes=(CauseSetup(name="node", units_per_node=1, mtbf_s=NODES * MTBF_S, num_nodes=0),),
)


def test_rate_of_the_job_is_that_of_all_units() -> None:
    assert mtbf_s(SETUP) == pytest.approx(MTBF_S)
    planned = replace(SETUP.causes[0], name="planned", planned=True)
    assert mtbf_s(replace(SETUP, causes=(*SETUP.causes, planned))) == pytest.approx(MTBF_S), "nothing is lost"
    lost = replace(SETUP, preemption_mtbf_s=NODES * MTBF_S)
    assert mtbf_s(lost) == pytest.approx(MTBF_S / 2)
    assert mtbf_s(replace(lost, notice_s=BLOCKING_S)) == pytest.approx(MTBF_S), "a checkpoint fits into the notice"


def test_rate_of_a_rising_weibull_is_the_mean_over_the_run() -> None:
    length_s = SETUP.undisturbed_s
    cause = CauseSetup(name="wear", units_per_node=0, mtbf_s=length_s, shape=3.0, age_s=length_s)
    assert mtbf_s(replace(SETUP, causes=(cause,))) == pytest.approx(length_s / (2**3 - 1))


def test_best_interval_is_as_good_as_youngs_and_dalys() -> None:
    """Mean time at the best interval within 1 % of that at both optima, and the optima within a third of it."""
    curve = interval_curve(SETUP, num_runs=40, seed=1)
    assert curve is not None
    assert curve.young_s == pytest.approx(math.sqrt(2 * BLOCKING_S * MTBF_S))
    for optimum_s in (curve.young_s, curve.daly_s):
        there = replace(SETUP, checkpoint_every=round(optimum_s / SETUP.step_s))
        mean_s = simulate(there, num_runs=40, seed=1).time_s.mean()
        assert curve.best.time_s == pytest.approx(mean_s, rel=0.01)
        assert curve.best.interval_s == pytest.approx(optimum_s, rel=1 / 3)


def test_ends_of_the_curve_take_longer_than_its_best_point() -> None:
    curve = interval_curve(SETUP, num_runs=40, seed=1)
    assert curve is not None
    assert min(curve.points[0].time_s, curve.points[-1].time_s) > 1.01 * curve.best.time_s
    assert curve.best in curve.points


@pytest.mark.parametrize("changes", [{"causes": ()}, {"checkpoint_every": 0}])
def test_no_curve_without_failures_or_checkpoints(changes: dict[str, object]) -> None:
    assert interval_curve(replace(SETUP, **changes), num_runs=2) is None  # type: ignore[arg-type]


def test_checkpoints_that_cost_nothing_come_after_every_step() -> None:
    curve = interval_curve(replace(SETUP, num_steps=3000, blocking_s=0.0), num_runs=40)
    assert curve is not None
    assert curve.best.every_steps == 1
