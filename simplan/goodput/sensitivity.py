"""Worth of single changes of a run: days and money that each saves, with the failures of the run itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from simplan.goodput.account import Floats, costs
from simplan.goodput.engines.simulate import simulate
from simplan.goodput.rates import scaled_failures
from simplan.goodput.sections import RunPrice
from simplan.goodput.setup import Runs, RunSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a run, and what it is worth.

    Attributes:
        name: Short name, as a key.
        words: The change in words.
        saved_s: Mean seconds by which the run is shorter.
        saved_s_error: Standard error of that, over runs with equal failures.
        saved_cost, saved_cost_error: The same of the cost; None without a price.
    """

    name: str
    words: str
    saved_s: float
    saved_s_error: float
    saved_cost: float | None
    saved_cost_error: float | None


def worth(
    setup: RunSetup,
    others: dict[tuple[str, str], RunSetup],
    *,
    price: RunPrice | None,
    num_runs: int,
    seed: int = 0,
    jobs: int = 1,
) -> tuple[Change, ...]:
    """Worth of the changes that a run allows, the most time saved first.

    Args:
        setup: The run.
        others: Further changes by name and words, such as the bandwidth of the storage.
        price: Price of device-hours; None for no cost.
        num_runs, seed, jobs: See ``simulate``.
    """
    runs = simulate(setup, num_runs=num_runs, seed=seed, jobs=jobs)
    changes = [
        _worth(name, words, (setup, runs), (changed, simulate(changed, num_runs=num_runs, seed=seed, jobs=jobs)), price)
        for (name, words), changed in {**dict(_changes(setup)), **others}.items()
    ]
    return tuple(sorted(changes, key=lambda change: -change.saved_s))


def _worth(
    name: str, words: str, before: tuple[RunSetup, Runs], after: tuple[RunSetup, Runs], price: RunPrice | None
) -> Change:
    saved_s, error_s = _mean_and_error(before[1].time_s - after[1].time_s)
    saved_cost: tuple[float | None, float | None] = (None, None)
    if price is not None:
        saved_cost = _mean_and_error(costs(*before, price) - costs(*after, price))
    return Change(
        name=name,
        words=words,
        saved_s=saved_s,
        saved_s_error=error_s,
        saved_cost=saved_cost[0],
        saved_cost_error=saved_cost[1],
    )


def _mean_and_error(values: Floats) -> tuple[float, float]:
    return float(values.mean()), standard_error(values)


def standard_error(values: Floats) -> float:
    """Standard error of the mean of independent values; 0 for one value."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _changes(setup: RunSetup) -> Iterator[tuple[tuple[str, str], RunSetup]]:
    """Changes that the run allows, by name and words."""
    if setup.restart_s:
        halved = replace(setup, restart_s=setup.restart_s / 2, takeover_s=setup.takeover_s / 2)
        yield ("restart", "restart in half the time"), halved
    noticed_late = any(cause.at_once < 1 for cause in setup.causes)
    if noticed_late and (setup.detection_s or (setup.timeout_s and any(cause.timeout for cause in setup.causes))):
        halved = replace(setup, detection_s=setup.detection_s / 2, timeout_s=setup.timeout_s / 2)
        yield ("detection", "notice failures in half the time"), halved
    if setup.diagnosis_s:
        yield ("diagnosis", "diagnosis in half the time"), replace(setup, diagnosis_s=setup.diagnosis_s / 2)
    if any(cause.num_nodes and cause.repair_s for cause in setup.causes):
        causes = tuple(replace(cause, repair_s=cause.repair_s / 2) for cause in setup.causes)
        yield ("repair", "repair in half the time"), replace(setup, causes=causes, repair_s=setup.repair_s / 2)
    if any(cause.num_nodes for cause in setup.causes) or math.isfinite(setup.slow_mtbf_s):
        yield ("spare", "one more spare node"), replace(setup, spares=setup.spares + 1)
    if any(not cause.planned for cause in setup.causes):
        yield ("failures", "failures half as often"), scaled_failures(setup, 2.0)
    if math.isfinite(setup.slow_mtbf_s) and setup.slow_found_s:
        yield ("fail_slow", "find slow devices in half the time"), replace(setup, slow_found_s=setup.slow_found_s / 2)
