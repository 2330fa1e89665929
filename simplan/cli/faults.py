"""``simplan run --fail``: the faults of a run, and what it is expected to lose by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from simplan.cli.terminal.output import say
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.goodput.executed import RecoveryTimes, causes_like, drawn_faults, expected_run, with_recovery
from simplan.goodput.sections import CheckpointPolicy, Recovery, Reliability, RunSections
from simplan.goodput.setup import CauseSetup, RunSetup, Size
from simplan.io import parse_model, read_model, read_yaml
from simplan.prediction import Prediction
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.elastic import Nodes
from simplan.runs.faults import Fault, FaultSchedule
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.scenario import Scenario
from simplan.scenario.whole_run.failures import HOUR_S, causes_of

SCENARIO = "scenario"
_NOTICE_S = 30.0


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
    given = {"--seed": seed, "--time-scale": time_scale, "--recovery": recovery}
    if fail is None:
        rule, fix = "is about the faults of a run", "add --fail"
        if problems := [Problem(field=flag, rule=rule, fix=fix) for flag, value in given.items() if value is not None]:
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
        causes: Failures to draw from.
        notice_s: Notice of preemptions that are drawn.
        recovery: Times of this machine; None to take those of the scenario.
    """

    options: FaultOptions
    schedule: tuple[Fault, ...]
    causes: tuple[CauseSetup, ...]
    notice_s: float
    recovery: RecoveryTimes | None


def read_faults(
    scenario: Scenario, options: FaultOptions, checkpointing: Checkpointing | None, num_nodes: int
) -> FaultRequest:
    """Reads what is asked for, before anything is calibrated or run.

    Raises:
        SpecError: A file cannot be read, a rank or node is not of the run, or the run cannot restart.
        NotModelledError: The scenario has failures that runs cannot meet.
    """
    if checkpointing is None or checkpointing.max_restarts == 0:
        missing = "--checkpoint-dir DIR" if checkpointing is None else "--max-restarts K"
        rule = "needs a run that restarts from a checkpoint"
        raise SpecError(Problem(field="--fail", value=options.fail, rule=rule, fix=f"add {missing}"))
    schedule: tuple[Fault, ...] = ()
    causes: tuple[CauseSetup, ...] = ()
    notice_s, rate = _NOTICE_S, _rate(options.fail)
    if options.fail == SCENARIO:
        causes, notice_s = _causes_of_scenario(scenario, options.time_scale)
    elif rate is not None:
        causes = (CauseSetup(name="rank", units_per_node=0, mtbf_s=HOUR_S / rate, num_nodes=0),)
    else:
        file = Path(options.fail)
        document = read_yaml(file)
        schedule = parse_model(FaultSchedule, document.data, document.lines, str(file)).faults
        if problems := list(_beyond_the_run(schedule, scenario, num_nodes)):
            raise SpecError(problems, file=str(file))
    recovery = None if options.recovery is None else _recovery_of(options.recovery)
    return FaultRequest(options, schedule, causes, notice_s, recovery)


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


def _recovery_of(file: Path) -> RecoveryTimes:
    measured = read_model(file, Measurement)
    if measured.times is None:
        rule = "is the measurement of a run whose time was not split"
        raise SpecError(Problem(field="--recovery", value=str(file), rule=rule, fix="name a run with --checkpoint-dir"))
    returns_s = [fault.for_s for fault in measured.job.faults if fault.node is not None and fault.for_s is not None]
    return RecoveryTimes.of(measured.times, measured.job.timeout_s, returns_s[0] if returns_s else 0.0)


_NOT_RUN = {
    "reliability.silent_corruption": "wrong numbers are not made",
    "reliability.fail_slow": "slow devices are not drawn; a file for --fail has kind: slow",
    "reliability.maintenance": "windows without nodes are not made",
    "checkpoint.memory": "checkpoints go to --checkpoint-dir alone",
    "spot.trace": "only rates are drawn",
    "spot.zone": "only preemptions_per_h is drawn",
    "evaluation": "runs do not evaluate",
}


def _causes_of_scenario(scenario: Scenario, scale: float) -> tuple[tuple[CauseSetup, ...], float]:
    """Causes in the time of the run, and the notice of preemptions."""
    sections = scenario.whole_run
    spot = None if sections is None else sections.spot
    if sections is None or (sections.reliability is None and spot is None):
        rule, fix = "has no failures", "add the section reliability or spot, or give failures per hour"
        raise SpecError(Problem(field="--fail", value=SCENARIO, rule=f"the scenario {rule}", fix=fix))
    if problems := list(_only_simulated(sections)):
        raise NotModelledError(problems, file=scenario.file)
    recovery = sections.recovery or Recovery()
    causes = [*causes_of(sections.reliability or Reliability(), recovery, scenario.job.cluster)]
    if spot is not None and spot.preemptions_per_h is not None:
        wait_s = HOUR_S * (spot.wait_h or 0.0)
        mtbf_s = HOUR_S / spot.preemptions_per_h
        planned = spot.notice_s > 0
        causes.append(CauseSetup(name="preemption", units_per_node=1, mtbf_s=mtbf_s, planned=planned, repair_s=wait_s))
    scaled = (
        replace(each, mtbf_s=each.mtbf_s / scale, age_s=each.age_s / scale, repair_s=each.repair_s / scale)
        for each in causes
    )
    return tuple(scaled), _NOTICE_S if spot is None else spot.notice_s / scale


def _only_simulated(sections: RunSections) -> Iterator[Problem]:
    given = sections.model_dump(exclude_none=True)
    for field, why in _NOT_RUN.items():
        section, _, key = field.partition(".")
        if section in given and (not key or key in given[section]):
            yield Problem(field=field, rule=f"is only simulated: {why}", fix="remove it for a run")
    if sections.recovery is not None and sections.recovery.policy == "continue":
        rule = "is only simulated: runs restart all ranks"
        yield Problem(field="recovery.policy", value="continue", rule=rule, fix="use policy: restart or shrink")


def with_faults(
    job: RunSpec,
    scenario: Scenario,
    request: FaultRequest,
    predictions: Mapping[int, Prediction],
    nodes: Nodes | None,
) -> RunSpec:
    """The job with its faults, and with what it is expected to be where times of restarts are known.

    Args:
        predictions: By number of nodes, the whole job and those on which it may go on.
    """
    setup = _setup(job, scenario, request, predictions, nodes)
    faults = request.schedule
    if not faults:
        per_node = job.plan.num_devices // setup.num_nodes
        faults = drawn_faults(setup, seed=request.options.seed, ranks_per_node=per_node, notice_s=request.notice_s)
    update: dict[str, object] = {"faults": faults}
    sections = scenario.whole_run
    if request.recovery is not None:
        setup = with_recovery(setup, request.recovery)
    if request.recovery is None and (sections is None or sections.recovery is None or sections.checkpoint is None):
        say("note: goodput is not predicted without --recovery, or the sections recovery and checkpoint")
    else:
        update["expected"] = expected_run(setup, seed=request.options.seed)
    return job.model_copy(update=update)


def _setup(
    job: RunSpec,
    scenario: Scenario,
    request: FaultRequest,
    predictions: Mapping[int, Prediction],
    nodes: Nodes | None,
) -> RunSetup:
    """Numbers of the run with the times of the scenario, or none."""
    assert job.checkpointing is not None
    sections, scale = scenario.whole_run or RunSections(), request.options.time_scale
    recovery, reliability = sections.recovery or Recovery(), sections.reliability or Reliability()
    policy = sections.checkpoint or CheckpointPolicy(interval_steps=1, blocking_s=0.0)
    elastic = nodes is not None and nodes.min_nodes < nodes.max_nodes
    setup = RunSetup(
        num_steps=job.num_all_steps,
        sizes=tuple(
            Size(num_nodes=number, step_s=each.step_time_s)
            for number, each in sorted(predictions.items(), reverse=True)
        ),
        devices_per_node=job.plan.num_devices // max(predictions),
        policy="shrink" if elastic else "restart",
        checkpoint_every=job.checkpointing.every,
        blocking_s=(policy.blocking_s or 0.0) / scale,
        load_s=(policy.load_s or 0.0) / scale,
        causes=request.causes,
        detection_s=reliability.detection_s / scale,
        timeout_s=job.timeout_s,
        diagnosis_s=recovery.diagnosis_s / scale,
        restart_s=(recovery.restart_s + recovery.warmup_s) / scale,
        takeover_s=inf if recovery.takeover_s is None else recovery.takeover_s / scale,
        spares=recovery.spares,
    )
    return replace(setup, causes=causes_like(request.schedule, setup.undisturbed_s)) if request.schedule else setup
