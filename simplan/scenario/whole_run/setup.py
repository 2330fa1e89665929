"""Numbers of a whole run for its simulation, from a scenario and the prediction of its step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from simplan import catalog
from simplan.errors import Problem, SpecError
from simplan.goodput.sections import CheckpointPolicy, Recovery, Reliability, RunSections, Spot
from simplan.goodput.setup import RunSetup, Size
from simplan.io import folder_of
from simplan.prediction import Prediction
from simplan.scenario.file import Scenario
from simplan.scenario.whole_run.checkpoints import Checkpoint, check_storage, checkpoint_of
from simplan.scenario.whole_run.failures import HOUR_S, causes_of
from simplan.scenario.whole_run.sizes import Predict, sizes_of
from simplan.scenario.whole_run.traces import read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRun:
    """Numbers of a scenario's run.

    Attributes:
        setup: The run. For ``checkpoint.interval_s: best``, with one checkpoint at its end.
        checkpoint: Size and times of a checkpoint; None without checkpoints.
        faster_storage: The run with twice the bandwidth of the storage; without one, with checkpoints in half the time;
            None without checkpoints.
        has_bandwidth: True if the scenario has a bandwidth of the storage.
    """

    setup: RunSetup
    checkpoint: Checkpoint | None
    faster_storage: RunSetup | None
    has_bandwidth: bool = False


def scenario_run(scenario: Scenario, prediction: Prediction, predict: Predict) -> ScenarioRun:
    """Numbers of a scenario's run.

    Args:
        scenario: The scenario.
        prediction: Prediction of its step.
        predict: Predicts the step of a smaller job.

    Raises:
        SpecError: The run has no length, its checkpoints do not fit the storage, or its trace is wrong or too small.
    """
    job = scenario.job
    run = scenario.whole_run or RunSections()
    num_steps = scenario.budget.steps(job.sequences_per_step, job.model.seq_len)
    if num_steps is None:
        fix = "add run: {num_steps: 100000}, or num_tokens or num_samples (--steps, --tokens)"
        raise SpecError(Problem(field="run", rule="is missing: a run needs a length", fix=fix), file=scenario.file)
    recovery = run.recovery or Recovery()
    whole = Size(num_nodes=job.cluster.num_nodes, step_s=prediction.mean_step_s(num_steps))
    setup = RunSetup(
        num_steps=num_steps,
        sizes=sizes_of(scenario, whole, predict),
        devices_per_node=job.cluster.ranks_per_node,
        **_recovery(recovery, scenario),
        **_reliability(run.reliability, recovery, scenario),
        **({} if run.spot is None else _spot(run.spot, scenario)),
    )
    if run.evaluation is not None:
        setup = replace(setup, evaluation_every=run.evaluation.every_steps, evaluation_s=run.evaluation.time_s)
    if run.spot is not None:
        _check_trace(setup, scenario)
    if run.checkpoint is None:
        return ScenarioRun(setup=setup, checkpoint=None, faster_storage=None)
    checkpoint = checkpoint_of(run.checkpoint, prediction)
    faster = checkpoint_of(_with_faster_storage(run.checkpoint), prediction)
    setup = _with_checkpoints(setup, run.checkpoint, checkpoint)
    return ScenarioRun(
        setup=setup,
        checkpoint=checkpoint,
        has_bandwidth=run.checkpoint.storage_bytes_per_s is not None,
        faster_storage=replace(setup, blocking_s=faster.blocking_s, write_s=faster.write_s, load_s=faster.load_s),
    )


def steps_of(seconds: float, step_s: float) -> int:
    """Whole number of steps nearest to a time, at least one."""
    return max(1, round(seconds / step_s))


def _with_checkpoints(setup: RunSetup, policy: CheckpointPolicy, checkpoint: Checkpoint) -> RunSetup:
    every = policy.interval_steps or setup.num_steps
    if isinstance(policy.interval_s, float | int):
        every = steps_of(policy.interval_s, setup.step_s)
    memory = policy.memory_tier
    of_memory: dict[str, Any] = {}
    if memory is not None:
        of_memory = {
            "memory_every": memory.interval_steps or steps_of(memory.interval_s or 0.0, setup.step_s),
            "memory_blocking_s": memory.blocking_s,
            "memory_load_s": memory.load_s,
        }
    return replace(
        setup,
        checkpoint_every=every,
        blocking_s=checkpoint.blocking_s,
        write_s=checkpoint.write_s,
        load_s=checkpoint.load_s,
        keep=policy.keep or 0,
        **of_memory,
    )


def check_kept(policy: CheckpointPolicy, checkpoint: Checkpoint, setup: RunSetup) -> None:
    """Check that the storage takes the checkpoints of a run that are kept.

    Raises:
        SpecError: It does not.
    """
    check_storage(policy, checkpoint.num_bytes, setup.num_steps // setup.checkpoint_every)


def _with_faster_storage(policy: CheckpointPolicy) -> CheckpointPolicy:
    """Twice the bandwidth of the storage, or where none is given half the times."""
    storage, read = policy.storage_bytes_per_s, policy.read_bytes_per_s
    if storage is not None:
        return policy.model_copy(update={"storage_bytes_per_s": 2 * storage, "read_bytes_per_s": read and 2 * read})
    times = {name: getattr(policy, name) for name in ("blocking_s", "write_s", "load_s")}
    return policy.model_copy(update={name: seconds / 2 for name, seconds in times.items() if seconds is not None})


def _recovery(recovery: Recovery, scenario: Scenario) -> dict[str, Any]:
    job = scenario.job
    more_s = recovery.init_s_per_device * job.cluster.num_devices + recovery.warmup_s
    return {
        "policy": recovery.policy,
        "restart_s": recovery.restart_s + more_s,
        "takeover_s": math.inf if recovery.takeover_s is None else recovery.takeover_s + more_s,
        "diagnosis_s": recovery.diagnosis_s,
        "spares": recovery.spares,
        "repair_s": HOUR_S * recovery.repair_h,
        "repair_is_exponential": recovery.repair_distribution == "exponential",
        "group_nodes": job.cluster.num_nodes // job.plan.dp_replicate if recovery.policy == "continue" else 1,
        "reconfigure_s": recovery.reconfigure_s,
        "join_s": recovery.join_s,
    }


def _reliability(reliability: Reliability | None, recovery: Recovery, scenario: Scenario) -> dict[str, Any]:
    if reliability is None:
        return {}
    fields: dict[str, Any] = {
        "causes": causes_of(reliability, recovery, scenario.job.cluster),
        "detection_s": reliability.detection_s,
        "timeout_s": reliability.timeout_s,
    }
    if (corruption := reliability.silent_corruption) is not None:
        fields["corruption_mtbf_s"] = HOUR_S * corruption.device_mtbf_h
        fields["corruption_found_s"] = HOUR_S * corruption.found_h
    if (slow := reliability.fail_slow) is not None:
        fields["slow_mtbf_s"] = HOUR_S * slow.device_mtbf_h
        fields["slow_factor"] = slow.slowdown
        fields["slow_found_s"] = HOUR_S * slow.found_h
    if (maintenance := reliability.maintenance) is not None:
        fields["maintenance_every_s"] = HOUR_S * maintenance.every_h
        fields["maintenance_s"] = HOUR_S * maintenance.duration_h
    return fields


def _spot(spot: Spot, scenario: Scenario) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "is_spot": True,
        "notice_s": spot.notice_s,
        "on_demand": spot.fallback == "on_demand",
    }
    if spot.trace is not None:
        times_s, nodes = read_trace(folder_of(scenario.file or "") / spot.trace)
        return {**fields, "trace_s": times_s, "trace_nodes": nodes}
    rates = {"preemptions_per_h": spot.preemptions_per_h, "wait_h": spot.wait_h}
    if spot.zone is not None:
        rates = catalog.spot_zone(spot.zone)
    assert rates["preemptions_per_h"] is not None, "a spot section without a trace has a rate"
    return {
        **fields,
        "preemption_mtbf_s": HOUR_S / rates["preemptions_per_h"],
        "spot_wait_s": HOUR_S * (rates["wait_h"] or 0.0),
    }


def _check_trace(setup: RunSetup, scenario: Scenario) -> None:
    """Check that a trace once has enough nodes for the job to start."""
    most_nodes, least = max(setup.trace_nodes, default=setup.num_nodes), setup.sizes[-1].num_nodes
    if setup.on_demand or most_nodes >= least:
        return
    whole = f"the {setup.num_nodes} nodes of the job" if least == setup.num_nodes else f"{least} nodes, the fewest,"
    rule = f"never has {whole} at one time: it has {most_nodes} at most"
    fix = "use fewer nodes, recovery.policy: shrink, or fallback: on_demand"
    trace = scenario.whole_run.spot.trace if scenario.whole_run and scenario.whole_run.spot else None
    raise SpecError(Problem(field="spot.trace", value=f'"{trace}"', rule=rule, fix=fix), file=scenario.file)
