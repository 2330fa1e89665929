"""Answers from simulated runs, against their closed forms and against sums."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from simplan.goodput.account import costs, device_hours, energies_kwh
from simplan.goodput.engines.simulate import simulate
from simplan.goodput.interval import interval_curve
from simplan.goodput.result import GoodputResult
from simplan.goodput.sections import Power, RunPrice
from simplan.goodput.sensitivity import worth
from simplan.goodput.setup import WATERFALL, CauseSetup, Runs, RunSetup, Size
from simplan.scenario import METRICS

SETUP = RunSetup(
    num_steps=1000,
    sizes=(Size(num_nodes=4, step_s=7.3),),
    devices_per_node=8,
    evaluation_every=100,
    evaluation_s=11.0,
    checkpoint_every=60,
    blocking_s=13.0,
)
FAILING = replace(
    SETUP,
    restart_s=100.0,
    detection_s=30.0,
    spares=1,
    repair_s=3600.0,
    causes=(CauseSetup(name="node", units_per_node=1, mtbf_s=4 * 1500.0, repair_s=3600.0),),
)
INTERVAL_S = (7.0, 8.0)


def result(setup: RunSetup, num_runs: int = 40, **fields: object) -> GoodputResult:
    runs = simulate(setup, num_runs=num_runs)
    return GoodputResult(name="x", setup=setup, runs=runs, seed=0, step_interval_s=INTERVAL_S, **fields)  # type: ignore[arg-type]


def test_without_failures_all_times_are_steps_evaluations_and_checkpoints() -> None:
    document = result(SETUP, 5).to_json()
    exact_s = pytest.approx(1000 * 7.3 + 10 * 11.0 + 16 * 13.0, rel=1e-12)
    time = document["time_to_finish_s"]
    assert time == {"mean": exact_s, "p10": exact_s, "p50": exact_s, "p90": exact_s, "standard_error": 0.0}
    assert document["undisturbed_s"] == exact_s
    assert document["goodput"] == pytest.approx(7300 / 7618)
    assert document["num_interruptions"]["mean"] == 0
    assert (document["best_interval_s"], document["cost"], document["energy_kwh"]) == (None, None, None)


def test_parts_of_the_time_sum_to_its_mean() -> None:
    document = result(FAILING).to_json()
    assert document["num_interruptions"]["mean"] > 1
    assert document["waterfall_s"].keys() == set(WATERFALL)
    assert math.fsum(document["waterfall_s"].values()) == pytest.approx(document["time_to_finish_s"]["mean"], rel=1e-14)
    assert document["waterfall_s"]["compute"] == pytest.approx(7300)
    assert document["goodput"] == pytest.approx(7300 / document["time_to_finish_s"]["mean"])
    low, high = document["goodput_quantiles"]["p10"], document["goodput_quantiles"]["p90"]
    assert low == pytest.approx(7300 / document["time_to_finish_s"]["p90"], rel=0.01)
    assert low < high


def test_hours_money_and_energy_are_those_of_the_uses_of_nodes() -> None:
    """One run: 4 nodes in use for 2 h, of which 1 h as spot, 1 h waiting, 1 spare for 3 h; 8 devices each."""
    runs = Runs(
        time_s=np.array([10_800.0]),
        waterfall_s=np.zeros((1, len(WATERFALL))),
        interruptions=np.zeros((1, 3), np.int64),
        node_s=3600.0 * np.array([[4.0, 4.0, 4.0, 3.0]]),
        checkpoints=np.zeros(1, np.int64),
    )
    assert device_hours(SETUP, runs).tolist() == [[32.0, 32.0, 32.0, 24.0]]
    price = RunPrice(device_hour=3.0, spot_device_hour=1.0, idle_device_hour=2.0)
    assert costs(SETUP, runs, price).tolist() == [32 * 3 + 32 * 1 + 32 * 3 + 24 * 2]
    assert costs(replace(SETUP, is_spot=True), runs, price).tolist() == [32 * 3 + 32 * 1 + 32 * 1 + 24 * 2]
    assert costs(SETUP, runs, RunPrice(device_hour=3.0)).tolist() == [120 * 3]
    power = Power(device_w=1000, idle_w=100, pue=1.5, co2_g_per_kwh=400)
    assert energies_kwh(SETUP, runs, power).tolist() == pytest.approx([1.5 * (64 * 1.0 + 56 * 0.1)])


def test_uncertain_step_time_widens_the_time_by_its_interval() -> None:
    """Without failures, steps alone vary: the 10 % and 90 % quantiles of a lognormal with that 90 % interval."""
    answer = result(SETUP, 4000)
    both = answer.to_json()["time_to_finish_with_step_interval_s"]
    pauses_s = 10 * 11.0 + 16 * 13.0
    sigma = math.log(8 / 7) / (2 * 1.6448536)
    for key, normal in (("p10", -1.2815516), ("p50", 0.0), ("p90", 1.2815516)):
        exact_s = pauses_s + 1000 * math.sqrt(7 * 8) * math.exp(sigma * normal)
        assert both[key] == pytest.approx(exact_s, rel=0.003)


def test_interruptions_are_told_by_cause() -> None:
    rare = CauseSetup(name="rare", units_per_node=0, mtbf_s=20_000.0, num_nodes=0)
    answer = result(replace(FAILING, causes=(rare, *FAILING.causes)))
    by_cause = answer.interruptions_by_cause
    assert list(by_cause) == ["node", "rare"]
    assert sum(by_cause.values()) == pytest.approx(answer.to_json()["num_interruptions"]["mean"])
    table = answer.to_dataframe()
    assert len(table) == 40
    assert table["num_rare"].mean() == pytest.approx(by_cause["rare"])
    parts = [f"{part}_s" for part in WATERFALL]
    assert table[parts].sum(axis=1).to_numpy() == pytest.approx(table["time_s"].to_numpy())


def test_worth_of_a_change_is_the_difference_of_runs_with_equal_failures() -> None:
    price = RunPrice(device_hour=2.0)
    changes = {change.name: change for change in worth(FAILING, {}, price=price, num_runs=40)}
    assert changes.keys() == {"restart", "detection", "repair", "spare", "failures"}
    other = replace(FAILING, restart_s=50.0)
    saved_s = simulate(FAILING, num_runs=40).time_s - simulate(other, num_runs=40).time_s
    restart = changes["restart"]
    assert restart.saved_s == pytest.approx(saved_s.mean())
    assert restart.saved_s_error == pytest.approx(saved_s.std(ddof=1) / math.sqrt(40))
    assert restart.saved_s > 3 * restart.saved_s_error, "equal failures leave little noise"
    assert changes["failures"].saved_s > 0
    assert changes["spare"].saved_cost is not None


def test_every_metric_of_a_whole_run_is_in_its_document() -> None:
    price, power = RunPrice(device_hour=1.0), Power(device_w=700, co2_g_per_kwh=50)
    curve = interval_curve(FAILING, num_runs=4)
    document = {"whole_run": result(FAILING, 4, price=price, power=power, curve=curve).to_json()}
    metrics = [metric for metric in METRICS.values() if metric.is_of_run]
    assert len(metrics) > 10
    for metric in metrics:
        assert isinstance(metric.read(document), float), metric.name


def test_equal_seeds_give_equal_answers_and_others_do_not() -> None:
    first, again = result(FAILING).to_json(), result(FAILING).to_json()
    assert first == again
    other = simulate(FAILING, num_runs=40, seed=1).time_s.mean()
    assert first["time_to_finish_s"]["mean"] != other
