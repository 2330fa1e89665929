"""Simulated runs against what is known in closed form."""

from __future__ import annotations

from itertools import accumulate
from math import expm1

import numpy as np
import pytest

from simplan.goodput.engines.simulate import simulate
from simplan.goodput.interval import daly_s, young_s
from simplan.goodput.setup import WATERFALL, CauseSetup, Runs, RunSetup, Size
from tests.goodput.setups import checkpointed, failures
from tests.support.slow import slow_except

WAITING = WATERFALL.index("waiting")


def standard_error(values: np.ndarray) -> float:
    return float(values.std() / np.sqrt(len(values)))


def ratio(runs: Runs, part: str) -> float:
    return float(runs.waterfall_s[:, WATERFALL.index(part)].sum() / runs.time_s.sum())


def with_checkpoints(interval: int, blocking_s: float, mtbf_s: float, **changes: float) -> RunSetup:
    """Steps of one second, 20,000 of them in whole intervals."""
    num_steps = 20_000 // interval * interval
    return checkpointed(
        num_steps, checkpoint_every=interval, blocking_s=blocking_s, causes=(failures(mtbf_s),), **changes
    )


def test_without_failures_a_run_takes_its_undisturbed_time() -> None:
    setup = checkpointed(
        100_003,
        checkpoint_every=100,
        blocking_s=3.1,
        evaluation_every=7,
        evaluation_s=0.7,
        memory_every=11,
        memory_blocking_s=0.2,
    )
    assert simulate(setup, num_runs=1).time_s[0] == pytest.approx(setup.undisturbed_s, rel=1e-12)


@pytest.mark.parametrize("is_exponential", [False, True])
def test_one_repairable_machine_is_available_for_a_fraction(is_exponential: bool) -> None:
    mtbf_s, repair_s = 1000.0, 400.0
    cause = failures(mtbf_s, num_nodes=1, repair_s=repair_s)
    setup = checkpointed(50_000, causes=(cause,), repair_is_exponential=is_exponential)
    runs = simulate(setup, num_runs=200)
    works = 1 - runs.waterfall_s[:, WAITING] / runs.time_s
    assert works.mean() == pytest.approx(mtbf_s / (mtbf_s + repair_s), abs=4 * standard_error(works))


def test_work_without_checkpoints_is_repeated() -> None:
    """Kulkarni, Nicola and Trivedi 1987: (M + R) (exp(work/M) - 1)."""
    setup = checkpointed(2000, checkpoint_every=0, causes=(failures(1000.0),), detection_s=300.0)
    time_s = simulate(setup, num_runs=10_000).time_s
    expected_s = (1000.0 + 300.0) * expm1(2000.0 / 1000.0)
    assert time_s.mean() == pytest.approx(expected_s, abs=4 * standard_error(time_s))


@pytest.mark.parametrize("mtbf_s", [400.0, 2000.0])
def test_mean_time_is_that_of_daly(mtbf_s: float) -> None:
    """Daly 2006: M exp(R/M) (exp((interval + blocking)/M) - 1) work / interval."""
    setup = with_checkpoints(200, 20.0, mtbf_s, restart_s=100.0, load_s=50.0)
    expected_s = mtbf_s * expm1(220.0 / mtbf_s) * (1 + expm1(150.0 / mtbf_s)) * 20_000.0 / 200.0
    assert simulate(setup, num_runs=2000).time_s.mean() == pytest.approx(expected_s, rel=0.01)


def test_best_of_a_grid_of_intervals_is_that_of_young_and_daly() -> None:
    blocking_s, mtbf_s = 10.0, 5000.0

    def mean_s(interval: int) -> float:
        """Per second of work."""
        setup = with_checkpoints(interval, blocking_s, mtbf_s, restart_s=50.0)
        return float(simulate(setup, num_runs=1000).time_s.mean() / setup.num_steps)

    best_s = min(map(mean_s, range(100, 1000, 50)))
    assert mean_s(round(young_s(blocking_s, mtbf_s))) <= 1.01 * best_s
    assert mean_s(round(daly_s(blocking_s, mtbf_s))) <= 1.01 * best_s
    assert mean_s(2000) > 1.01 * best_s


def test_daly_meets_young_for_rare_failures_and_the_mean_time_for_long_checkpoints() -> None:
    assert daly_s(1.0, 1e8) == pytest.approx(young_s(1.0, 1e8), rel=1e-3)
    assert daly_s(200.0, 100.0) == 100.0


@pytest.mark.parametrize("mtbf_s", [3000.0, 20_000.0])
def test_effective_time_ratio_is_that_of_meta(mtbf_s: float) -> None:
    """Kokolis et al., arXiv 2410.21680: (1 - (restart + interval / 2) / M) / (1 + blocking / interval)."""
    runs = simulate(with_checkpoints(250, 10.0, mtbf_s, restart_s=200.0), num_runs=1000)
    assert ratio(runs, "compute") == pytest.approx((1 - (200.0 + 250.0 / 2) / mtbf_s) / (1 + 10.0 / 250.0), rel=0.05)


@pytest.mark.parametrize(
    ("shape", "age_s"), slow_except([(2.0, 3000.0)], [(0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (2.0, 3000.0)])
)
def test_failures_are_a_power_law_process_in_age(shape: float, age_s: float) -> None:
    mtbf_s, units = 2500.0, 5
    cause = failures(mtbf_s, units_per_node=units, shape=shape, age_s=age_s)
    counts = simulate(checkpointed(10_000, causes=(cause,)), num_runs=1000).interruptions[:, 0]
    expected = units * (((10_000 + age_s) / mtbf_s) ** shape - (age_s / mtbf_s) ** shape)
    assert counts.mean() == pytest.approx(expected, rel=0.01, abs=4 * standard_error(counts))
    assert counts.var() == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("spares", slow_except([1], [0, 1, 3]))
def test_waiting_for_spares_is_that_of_erlang(spares: int) -> None:
    """A job that only fails while it runs waits as often as a group of ``spares + 1`` lines is busy (Erlang B)."""
    num_nodes, mtbf_s, repair_s = 10, 20_000.0, 1500.0
    cause = CauseSetup(name="node", units_per_node=1, mtbf_s=mtbf_s, repair_s=repair_s)
    sizes = (Size(num_nodes=num_nodes, step_s=1.0),)
    setup = checkpointed(50_000, sizes=sizes, causes=(cause,), spares=spares, repair_is_exponential=True)
    runs = simulate(setup, num_runs=200)
    load = num_nodes * repair_s / mtbf_s
    *_, busy = accumulate(range(1, spares + 2), lambda blocked, k: load * blocked / (k + load * blocked), initial=1.0)
    waits = runs.waterfall_s[:, WAITING] / runs.time_s
    assert waits.mean() == pytest.approx(busy, rel=0.02, abs=4 * standard_error(waits))
