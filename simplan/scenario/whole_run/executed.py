"""Whole runs and executed ones: faults for ``simplan run --fail``, and measured restarts for ``simplan goodput``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from simplan.errors import NotModelledError, Problem, SpecError
from simplan.goodput.executed import (
    RecoveryTimes,
    causes_like,
    drawn_faults,
    expected_run,
    scaled,
    with_preemptions,
    with_recovery,
)
from simplan.goodput.rates import time_between_stops_s
from simplan.goodput.sections import Recovery, RunSections
from simplan.goodput.setup import CauseSetup, RunSetup, Size
from simplan.io import parse_model, read_model, read_yaml
from simplan.prediction import Prediction
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.elastic import RendezvousOptions
from simplan.runs.faults import Fault, FaultSchedule
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.scenario.file import Scenario
from simplan.scenario.whole_run.failures import HOUR_S
from simplan.scenario.whole_run.setup import scenario_run
from simplan.training import TrainingBudget
from simplan.units import counted, format_span

SCENARIO = "scenario"
_MAX_EXPONENT = 7.0
"""Mean times between stops from a stop to the next checkpoint; one of 1,100 attempts gets there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Options of a run about faults, as given.

    Attributes:
        fail: A file, failures of ranks per hour of the job, or ``scenario``.
        seed: Seed of drawn failures.
        time_scale: Seconds of the scenario that pass in one second of the run.
        recovery: Measurement of an earlier run with a restart.
    """

    fail: str
    seed: int = 0
    time_scale: float = 1.0
    recovery: Path | None = None


def fault_options(
    fail: str | None, seed: int | None, time_scale: float | None, recovery: Path | None
) -> FaultOptions | None:
    """Options as the flags say; None without faults.

    Raises:
        SpecError: A flag has no meaning without ``--fail``, or with what it says.
    """
    options = {"--seed": seed, "--time-scale": time_scale, "--recovery": recovery}
    if fail is None:
        rule, fix = "is about the faults of a run", "add --fail"
        if problems := [
            Problem(field=flag, rule=rule, fix=fix) for flag, value in options.items() if value is not None
        ]:
            raise SpecError(problems)
        return None
    if time_scale is not None and fail != SCENARIO:
        rule = "is the time of the scenario over that of the run"
        raise SpecError(Problem(field="--time-scale", value=f"{time_scale:g}", rule=rule, fix="use --fail scenario"))
    return FaultOptions(fail=fail, seed=seed or 0, time_scale=time_scale or 1.0, recovery=recovery)


@dataclass(frozen=True, slots=True)
class FaultRequest:
    """Faults that were asked for, read and checked.

    Attributes:
        schedule: Faults of a file; empty where they are drawn.
        rate_per_h: Killed ranks per hour of the job; None for the failures of the scenario, or for a file.
        recovery: Times of this machine; None to take those of the scenario.
    """

    options: FaultOptions
    schedule: tuple[Fault, ...]
    rate_per_h: float | None
    recovery: RecoveryTimes | None


def read_faults(
    scenario: Scenario, options: FaultOptions, checkpointing: Checkpointing | None, num_nodes: int
) -> FaultRequest:
    """Reads what is asked for, before anything is calibrated or run.

    Raises:
        SpecError: A file cannot be read, a rank or node is not of the run, or the run cannot restart.
        NotModelledError: The scenario has what only simulated runs meet.
    """
    if checkpointing is None or checkpointing.max_restarts == 0:
        missing = "--checkpoint-dir DIR" if checkpointing is None else "--max-restarts K"
        rule = "needs a run that restarts from a checkpoint"
        raise SpecError(Problem(field="--fail", value=options.fail, rule=rule, fix=f"add {missing}"))
    schedule: tuple[Fault, ...] = ()
    rate = _rate(options.fail)
    if options.fail == SCENARIO:
        _check_scenario(scenario)
    elif rate is None:
        document = read_yaml(options.fail)
        schedule = parse_model(FaultSchedule, document.data, document.lines, options.fail).faults
        if problems := list(_beyond_the_run(schedule, scenario, num_nodes)):
            raise SpecError(problems, file=options.fail)
    recovery = None if options.recovery is None else _recovery_of(scenario, options.recovery)
    return FaultRequest(options, schedule, rate, recovery)


def _rate(text: str) -> float | None:
    """Failures per hour; None for another text."""
    try:
        rate = float(text)
    except ValueError:
        return None
    if not 0 < rate < inf:
        rule, fix = "must be above zero and finite", "give failures per hour of the job, e.g. 60"
        raise SpecError(Problem(field="--fail", value=text, rule=rule, fix=fix))
    return rate


def _beyond_the_run(schedule: tuple[Fault, ...], scenario: Scenario, num_nodes: int) -> Iterator[Problem]:
    num_ranks = scenario.job.plan.num_devices
    for number, fault in enumerate(schedule):
        field = f"faults.{number}"
        if fault.rank is not None and fault.rank >= num_ranks:
            yield Problem(field=f"{field}.rank", value=str(fault.rank), rule=f"must be below {num_ranks}, the ranks")
        if fault.node is not None and fault.node >= num_nodes:
            rule = "is no node besides that at the endpoint, which has the store of the run"
            fix = f"use 1 to {num_nodes - 1}" if num_nodes > 1 else "name a rank, or run on several nodes"
            yield Problem(field=f"{field}.node", value=str(fault.node), rule=rule, fix=fix)


def _recovery_of(scenario: Scenario, file: Path) -> RecoveryTimes:
    measured = read_model(file, Measurement)
    if measured.job.model != scenario.job.model:
        rule, fix = "is the measurement of a run of another model", "name a run of this scenario"
        raise SpecError(Problem(field="--recovery", value=str(file), rule=rule, fix=fix))
    if measured.times is None:
        rule = "is the measurement of a run whose time was not split"
        raise SpecError(Problem(field="--recovery", value=str(file), rule=rule, fix="name a run with --checkpoint-dir"))
    returns_s = [fault.for_s for fault in measured.job.faults if fault.node is not None and fault.for_s is not None]
    return RecoveryTimes.of(measured.times, measured.job.timeout_s, returns_s[0] if returns_s else 0.0)


def with_measured_recovery(scenario: Scenario, file: Path) -> Scenario:
    """The scenario with the times of an earlier run of its job, of which the restarts include loading.

    Steps are still predicted, and the time to diagnose a failure is still the scenario's.

    Raises:
        SpecError: The file is no measurement of a run that has restarted, or of one with another model or other ranks.
    """
    times, sections = _recovery_of(scenario, file), scenario.whole_run or RunSections()
    ranks, num_devices = read_model(file, Measurement).job.plan.num_devices, scenario.job.plan.num_devices
    if ranks != num_devices:
        rule = f"is the measurement of {counted(ranks, 'rank')}, and the scenario has {counted(num_devices, 'device')}"
        fix = "name a run of as many, or give recovery.restart_s"
        raise SpecError(Problem(field="--recovery", value=str(file), rule=rule, fix=fix))
    restart_s = times.waiting_s + times.restart_s
    recovery = (sections.recovery or Recovery()).model_copy(
        update={"restart_s": restart_s, "init_s_per_device": 0.0, "warmup_s": 0.0}
    )
    reliability, checkpoint = sections.reliability, sections.checkpoint
    parts = [f"a restart takes {format_span(restart_s)}"]
    if reliability is not None:
        timeout_s = reliability.timeout_s + times.after_timeout_s
        reliability = reliability.model_copy(update={"detection_s": times.detection_s, "timeout_s": timeout_s})
        parts.append(f"detection {format_span(times.detection_s)}")
    if checkpoint is not None:
        checkpoint = checkpoint.model_copy(update={"load_s": 0.0})
        if not checkpoint.async_save:  # the executor writes while training waits
            checkpoint = checkpoint.model_copy(update={"blocking_s": times.checkpoint_s})
            parts.append(f"a checkpoint {format_span(times.checkpoint_s)}")
    changed = {"recovery": recovery, "reliability": reliability, "checkpoint": checkpoint}
    sentence = f"{', '.join(parts)}, as measured in {file}"
    run = sections.model_copy(update=changed)
    return replace(scenario, whole_run=run, assumptions=(*scenario.assumptions, sentence))


_NOT_RUN = {
    "reliability.silent_corruption": "wrong numbers are not made",
    "reliability.fail_slow": "slow devices are not drawn; a file for --fail has kind: slow",
    "reliability.maintenance": "windows without nodes are not made",
    "checkpoint.memory_tier": "checkpoints go to --checkpoint-dir alone",
    "recovery.takeover_s": "a spare starts its ranks when it takes a place",
    "spot.trace": "only rates are drawn",
    "evaluation": "runs do not evaluate",
}
"""Keys that only simulated runs have, and what runs do."""
_NOT_RUN_AS = {
    ("checkpoint.async_save", True): "training waits until a checkpoint is written",
    ("recovery.policy", "continue"): "all ranks restart",
    ("recovery.repair_distribution", "exponential"): "a node is back after a fixed time",
    ("spot.fallback", "on_demand"): "there are no other nodes",
}


def _check_scenario(scenario: Scenario) -> None:
    sections = scenario.whole_run
    if sections is None or (sections.reliability is None and sections.spot is None):
        rule, fix = "has no failures", "add the section reliability or spot, or give failures per hour"
        raise SpecError(Problem(field="--fail", value=SCENARIO, rule=f"the scenario {rule}", fix=fix))
    section_values = sections.model_dump(exclude_none=True)
    values = {
        f"{name}.{key}": value for name, section in section_values.items() for key, value in section.items()
    } | section_values
    reasons = [(field, why) for field, why in _NOT_RUN.items() if field in values]
    reasons += [(field, why) for (field, value), why in _NOT_RUN_AS.items() if values.get(field) == value]
    causes = () if sections.reliability is None else sections.reliability.causes
    reasons += [
        (f"reliability.causes.{number}.scope", "one node is lost at a time")
        for number, cause in enumerate(causes)
        if cause.scope in ("rack", "pod")
    ]
    if reasons:
        problems = [Problem(field=field, rule=f"is only simulated: {why}", fix="remove it") for field, why in reasons]
        raise NotModelledError(problems, file=scenario.file)


def with_faults(
    job: RunSpec,
    scenario: Scenario,
    request: FaultRequest,
    predictions: Mapping[int, Prediction],
    nodes: RendezvousOptions | None,
) -> RunSpec:
    """The job with its faults, and with its expected goodput where the times of restarts are known.

    Args:
        predictions: By number of nodes, the whole job and those on which it may go on.

    Raises:
        SpecError: The run would never finish.
    """
    setup = _setup(job, scenario, request, predictions, nodes)
    faults, options, sections = request.schedule, request.options, scenario.whole_run
    is_known = sections is not None and sections.recovery is not None and sections.checkpoint is not None
    if request.recovery is not None:
        setup, is_known = with_recovery(setup, request.recovery), True
    if not faults:
        _check_finishes(setup, options.fail)
        per_node = job.plan.num_devices // setup.num_nodes
        faults = drawn_faults(setup, seed=options.seed, ranks_per_node=per_node)
    expected = expected_run(setup, seed=options.seed) if is_known and _finishes(setup) else None
    return job.model_copy(update={"faults": faults, "expected": expected})


def _finishes(setup: RunSetup) -> bool:
    """True for a run that gets to its next checkpoint in one of 1,100 attempts or more often."""
    return setup.restart_s + setup.load_s + _work_s(setup) <= _MAX_EXPONENT * time_between_stops_s(setup)


def _work_s(setup: RunSetup) -> float:
    """Seconds of steps to a checkpoint, and of the checkpoint."""
    return min(setup.checkpoint_every, setup.num_steps) * setup.step_s + setup.blocking_s


def _check_finishes(setup: RunSetup, fail: str) -> None:
    """Check that a run gets on between two stops.

    Raises:
        SpecError: It hardly ever does.
    """
    if _finishes(setup):
        return
    rule = (
        f"the run never finishes: it stops every {format_span(time_between_stops_s(setup))} in the mean, and a restart "
        f"takes {format_span(setup.restart_s + setup.load_s)}, the steps to a checkpoint {format_span(_work_s(setup))}"
    )
    fix = "let failures be rarer, restarts shorter (--recovery, recovery.restart_s), or checkpoints more frequent"
    raise SpecError(Problem(field="--fail", value=fail, rule=rule, fix=fix))


def _setup(
    job: RunSpec,
    scenario: Scenario,
    request: FaultRequest,
    predictions: Mapping[int, Prediction],
    nodes: RendezvousOptions | None,
) -> RunSetup:
    """Numbers of the run with the times of the scenario, those of steps excepted, over the time scale."""
    assert job.checkpointing is not None
    whole, elastic = predictions[max(predictions)], nodes is not None and nodes.min_nodes < nodes.max_nodes
    with_spot = request.options.fail == SCENARIO
    setup = scaled(_of_scenario(job, scenario, whole, with_spot=with_spot), request.options.time_scale)
    sizes = [(number, predicted.mean_step_s(job.num_all_steps)) for number, predicted in predictions.items()]
    setup = replace(
        setup,
        sizes=tuple(Size(num_nodes=number, step_s=step_s) for number, step_s in sorted(sizes, reverse=True)),
        policy="shrink" if elastic else "restart",
        checkpoint_every=job.checkpointing.every,
        timeout_s=job.timeout_s,
    )
    if request.schedule:
        return replace(setup, causes=causes_like(request.schedule, setup.undisturbed_s))
    if request.rate_per_h is not None:
        cause = CauseSetup(name="rank", units_per_node=0, mtbf_s=HOUR_S / request.rate_per_h, num_nodes=0)
        return replace(setup, causes=(cause,))
    setup = with_preemptions(setup)
    if setup.num_nodes == 1:  # which loses ranks alone: it has the store of the run
        setup = replace(setup, causes=tuple(replace(cause, num_nodes=0) for cause in setup.causes))
    return setup


def _of_scenario(job: RunSpec, scenario: Scenario, prediction: Prediction, *, with_spot: bool) -> RunSetup:
    """Numbers of the scenario as a run of this length on all nodes, without what only simulated runs have."""
    sections = scenario.whole_run or RunSections()
    recovery, reliability, checkpoint = sections.recovery or Recovery(), sections.reliability, sections.checkpoint
    update: dict[str, Any] = {
        "run": None,
        "evaluation": None,
        "recovery": recovery.model_copy(update={"policy": "restart", "min_nodes": None, "takeover_s": None}),
    }
    if reliability is not None:
        without = dict.fromkeys(("silent_corruption", "fail_slow", "maintenance"))
        update["reliability"] = reliability.model_copy(update=without)
    if checkpoint is not None:
        update["checkpoint"] = checkpoint.model_copy(update={"memory_tier": None, "async_save": False})
    if not with_spot:
        update["spot"] = None
    budget = TrainingBudget(num_steps=job.num_all_steps)
    whole = replace(scenario, whole_run=sections.model_copy(update=update), budget=budget)
    return scenario_run(whole, prediction, lambda smaller: prediction).setup
