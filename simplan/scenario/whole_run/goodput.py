"""Simulated runs of a scenario, and the answers from them."""

from __future__ import annotations

import math
from dataclasses import replace

from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError
from simplan.goodput.endless import endless
from simplan.goodput.engines.simulate import simulate
from simplan.goodput.interval import interval_curve, young_s
from simplan.goodput.rates import mtbf_s
from simplan.goodput.result import GoodputResult
from simplan.goodput.sections import RunPrice, RunSections
from simplan.goodput.sensitivity import worth
from simplan.goodput.setup import RunSetup
from simplan.prediction import Prediction
from simplan.scenario.file import Scenario
from simplan.scenario.whole_run.setup import ScenarioRun, check_kept, scenario_run, steps_of
from simplan.scenario.whole_run.words import endless_error

NUM_RUNS = 500
"""Default number of simulated runs."""
_NUM_COMPARED = 100
"""Runs of each checkpoint interval and of each change, whose failures are equal."""


def goodput_of(
    scenario: Scenario,
    *,
    prediction: Prediction | None = None,
    calibration: Calibration | None = None,
    num_runs: int = NUM_RUNS,
    seed: int = 0,
    jobs: int = 1,
    compares: bool = True,
) -> GoodputResult:
    """Simulate the whole run of a scenario.

    Args:
        scenario: Scenario with a length of the run.
        prediction: Prediction of its step; None to predict it here.
        calibration: See ``Scenario.predict``.
        num_runs: Simulated runs.
        seed: Seed of their failures; equal seeds give equal results.
        jobs: Worker processes; -1 for one per core. Under ``joblib.parallel_config``, workers of that backend (Dask,
            Ray).
        compares: False to leave out the curve of checkpoint intervals, unless it is needed, and the worth of changes.

    Raises:
        SpecError: The run has no length, never finishes, or its sections contradict the job.
    """
    prediction = prediction or scenario.predict(calibration)
    run = scenario_run(scenario, prediction, lambda smaller: smaller.predict(calibration))
    sections, setup = scenario.whole_run or RunSections(), run.setup
    policy = sections.checkpoint
    is_best = policy is not None and policy.interval_s == "best"
    if is_best and math.isfinite(failures_s := mtbf_s(setup)):
        setup = replace(setup, checkpoint_every=steps_of(young_s(setup.blocking_s, failures_s), setup.step_s))
    if (reason := endless(setup)) is not None:
        raise endless_error(reason, scenario)
    num_compared = min(num_runs, _NUM_COMPARED)
    curve = interval_curve(setup, num_runs=num_compared, seed=seed, jobs=jobs) if compares or is_best else None
    if is_best and curve is None:
        rule = "has nothing to weigh: without failures, checkpoints only cost time"
        fix = "give seconds, or reliability: {device_mtbf_h: 50000}"
        problem = Problem(field="checkpoint.interval_s", value="best", rule=rule, fix=fix)
        raise SpecError(problem, file=scenario.file)
    if is_best and curve is not None:
        setup = replace(setup, checkpoint_every=curve.best.every_steps)
    if policy is not None and run.checkpoint is not None:
        check_kept(policy, run.checkpoint, setup)
    price = _price(scenario, sections)
    others = _other_changes(run, setup, None if is_best or curve is None else curve.best.every_steps)
    return GoodputResult(
        name=scenario.name,
        setup=setup,
        runs=simulate(setup, num_runs=num_runs, seed=seed, jobs=jobs),
        seed=seed,
        step_interval_s=_step_interval_s(prediction, setup),
        price=price,
        power=sections.power,
        checkpoint_bytes=None if run.checkpoint is None else run.checkpoint.num_bytes,
        curve=curve,
        changes=worth(setup, others, price=price, num_runs=num_compared, seed=seed, jobs=jobs) if compares else (),
        memory_verdict=prediction.memory_verdict,
        assumptions=scenario.assumptions,
    )


def _price(scenario: Scenario, sections: RunSections) -> RunPrice | None:
    """Prices, with the mean one of all devices on demand where nodes differ."""
    price = scenario.budget.price_per_device_hour
    if price is None:
        return None
    return (sections.price or RunPrice(device_hour=price)).model_copy(update={"device_hour": price})


def _step_interval_s(prediction: Prediction, setup: RunSetup) -> tuple[float, float]:
    """90 % interval of the mean step of the run."""
    factor = setup.step_s / prediction.step_time_s
    low_s, high_s = prediction.step_time_interval_s
    return factor * low_s, factor * high_s


def _other_changes(run: ScenarioRun, setup: RunSetup, best_every: int | None) -> dict[tuple[str, str], RunSetup]:
    """Changes that need the sections: bandwidth of the storage, and the best checkpoint interval."""
    changes = {}
    faster = run.faster_storage
    if faster is not None and setup.checkpoint_every:
        words = "twice the bandwidth of the storage" if run.has_bandwidth else "checkpoints in half the time"
        changes["storage", words] = replace(faster, checkpoint_every=setup.checkpoint_every)
    if best_every is not None and best_every != setup.checkpoint_every:
        changes["interval", "the best checkpoint interval"] = replace(setup, checkpoint_every=best_every)
    return changes
