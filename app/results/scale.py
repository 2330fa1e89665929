"""Sensitivity of a plan: sweeps over one setting, value of 1 % more of a resource, and cost of a slow rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from app.results.plan import predicted_step
from app.state import document_text
from simplan.cluster.hardware import LinkSpec
from simplan.document import parse_yaml
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.predict import Resource, Simulated, marginal_values
from simplan.predict.sensitivity import MarginalValue, improved
from simplan.predict.step_summary import summarize_step
from simplan.prediction import Prediction
from simplan.scenario import Scenario, parse_scenario
from simplan.sim.compiled import compile_program


@dataclass(frozen=True, slots=True)
class ScaleAxis:
    """Axis of a sweep: a number of the scenario, or a rate of the hardware.

    Attributes:
        label: Name of the axis.
        unit: Unit of the axis; empty for a count.
        factors: Values of the axis, as factors of the scenario's value.
        path: Keys of a whole number in the scenario; None for a rate of the hardware.
        resource: Rate of the hardware; None for a number of the scenario.
        unit_size: Bytes or FLOPs per second in the unit of a rate.
    """

    label: str
    unit: str
    factors: tuple[float, ...]
    path: tuple[str, str] | None = None
    resource: Resource | None = None
    unit_size: float = 1e9

    def words(self, scenario: Scenario) -> str:
        """Label with unit; a rate that the catalog does not know is relative."""
        relative = self.resource is not None and _rate(scenario, self.resource) is None
        return ", ".join(filter(None, (self.label, "relative" if relative else self.unit)))


def _rate(scenario: Scenario, resource: Resource) -> float | None:
    """Rate of one device in bytes or FLOPs per second; None for an unknown one."""
    cluster = scenario.job.cluster
    match resource:
        case Resource.COMPUTE:
            return cluster.device.peak_flop_per_s.get(scenario.job.training.precision)
        case Resource.MEMORY_BANDWIDTH:
            return cluster.device.memory_bandwidth_bytes_per_s
    link: LinkSpec | None = getattr(cluster, resource)
    return None if link is None else link.bytes_per_s


_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_RATES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
AXES: Mapping[str, ScaleAxis] = MappingProxyType(
    {
        "devices": ScaleAxis("devices", "", _FACTORS, ("cluster", "num_devices")),
        "batch": ScaleAxis("global batch size", "sequences", _FACTORS, ("training", "global_batch_size")),
        "sequence": ScaleAxis("sequence length", "tokens", _FACTORS, ("model", "seq_len")),
        "microbatch": ScaleAxis("microbatch size", "sequences", _FACTORS, ("plan", "microbatch_size")),
        "inter_link": ScaleAxis("bandwidth between nodes", "GB/s per device", _RATES, resource=Resource.INTER_LINK),
        "intra_link": ScaleAxis("bandwidth within nodes", "GB/s per device", _RATES, resource=Resource.INTRA_LINK),
        "compute": ScaleAxis("dense peak of a device", "TFLOP/s", _RATES, resource=Resource.COMPUTE, unit_size=1e12),
        "memory_bandwidth": ScaleAxis(
            "memory bandwidth of a device", "GB/s", _RATES, resource=Resource.MEMORY_BANDWIDTH
        ),
    }
)
"""Axes by key."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """Prediction of the plan with one setting changed.

    Attributes:
        value: Value on the axis.
        refused: Error of an impossible point; empty for a point with a prediction.
        num_devices: Number of devices.
        step_time_s, step_time_interval_s: Predicted step time and its 90 % interval, in seconds.
        samples_per_s, tokens_per_s: Throughput of all devices together.
        device_bytes: Memory of the peak-memory rank, in bytes.
        fits: True when the memory is within the capacity; None when the capacity is unknown.
    """

    value: float
    refused: str = ""
    num_devices: int = 0
    step_time_s: float = 0.0
    step_time_interval_s: tuple[float, float] = (0.0, 0.0)
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    device_bytes: int = 0
    fits: bool | None = None


def place_on(scenario: Scenario, axis: str) -> float:
    """Value of the scenario on an axis; 1 on the axis of an unknown rate, which is relative."""
    job, resource = scenario.job, AXES[axis].resource
    if resource is not None:
        rate = _rate(scenario, resource)
        return 1.0 if rate is None else rate / AXES[axis].unit_size
    values = {
        "devices": job.cluster.num_devices,
        "batch": job.training.global_batch_size,
        "sequence": job.model.seq_len,
        "microbatch": job.plan.microbatch_size,
    }
    return values[axis]


def sweep(text: str, axis: str, batch_follows: bool) -> tuple[ScalePoint, ...]:
    """Predictions of a scenario's plan over one axis; every point is predicted separately.

    Args:
        text: The scenario's YAML.
        axis: Key of ``AXES``.
        batch_follows: Scale the global batch with the devices (weak scaling) instead of keeping it.
    """
    scenario = _own_devices(text)
    resource, path, factors = AXES[axis].resource, AXES[axis].path, AXES[axis].factors
    if resource is not None:
        here = place_on(scenario, axis)
        return tuple(_with_rate(scenario, resource, factor, here * factor) for factor in factors)
    assert path is not None
    section, key = path
    data = parse_yaml(text, "scenario").data

    def parsed(value: int) -> Scenario:
        if axis == "devices":
            changed = _on_devices(data, scenario, value, batch_follows=batch_follows)
        else:
            changed = {**data, section: {**(data.get(section) or {}), key: value}}
        return parse_scenario(document_text(changed))

    now = place_on(scenario, axis)
    sizes = {int(now * factor) for factor in factors if now * factor >= 1}
    return tuple(_point(float(size), partial(parsed, size)) for size in sorted(sizes))


def _own_devices(text: str) -> Scenario:
    scenario = parse_scenario(text)
    if scenario.job.cluster.cores_per_node is not None:
        rule = "shares its cores among ranks; sensitivity of shared cores is not modeled"
        problem = Problem(
            field="cluster.preset", value=scenario.job.cluster.id, rule=rule, fix="choose another cluster"
        )
        raise NotModelledError(problem)
    return scenario


def _step_on_own_devices(text: str) -> tuple[Prediction, Simulated]:
    _own_devices(text)
    return predicted_step(text, 0)  # predictions for such devices use no calibration


def _on_devices(data: dict[str, Any], scenario: Scenario, devices: int, *, batch_follows: bool) -> dict[str, Any]:
    """Plan on another number of devices: scales ``dp_shard`` if the plan shards, else ``dp_replicate``."""
    plan, before = scenario.job.plan, scenario.job.cluster.num_devices
    axis = "dp_shard" if plan.dp_shard > 1 else "dp_replicate"
    scaled = getattr(plan, axis) * devices / before
    if scaled != int(scaled):
        rule = f"leaves {scaled:.3g} {axis} with tp {plan.tp}, cp {plan.cp} and pp {plan.pp}"
        raise SpecError(Problem(field="cluster.num_devices", value=str(devices), rule=rule))
    cluster = {key: value for key, value in data["cluster"].items() if key != "num_nodes"}
    section = {**data["plan"], axis: int(scaled)}
    if axis == "dp_shard" and int(scaled) == 1:
        section.pop("dp_shard")
    found = {**data, "cluster": {**cluster, "num_devices": devices}, "plan": section}
    if batch_follows:
        batch = scenario.job.training.global_batch_size * devices // before
        found["training"] = {**data["training"], "global_batch_size": max(1, batch)}
    return found


def _with_rate(scenario: Scenario, resource: Resource, factor: float, value: float) -> ScalePoint:
    cluster = improved(scenario.job.cluster, resource, factor)
    if cluster is None:
        return ScalePoint(value, "the cluster has no such link, or its rate is unknown")
    return _point(value, lambda: replace(scenario, job=replace(scenario.job, cluster=cluster)))


def _point(value: float, parsed: Callable[[], Scenario]) -> ScalePoint:
    try:
        job = parsed().job
        step = summarize_step(job)
    except SpecError as error:
        return ScalePoint(value, "; ".join(problem.sentence() for problem in error.problems))
    samples_per_s = job.training.global_batch_size / step.step_time_s
    tokens = 0 if job.model.sample == "image" else job.model.seq_len
    return ScalePoint(
        value,
        num_devices=job.cluster.num_devices,
        step_time_s=step.step_time_s,
        step_time_interval_s=step.step_time_interval_s,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens,
        device_bytes=step.peak_bytes["device"],
        fits=step.fits,
    )


def worth(text: str) -> tuple[MarginalValue, ...]:
    """Change of the step time with one percent more of each hardware rate."""
    return marginal_values(*_step_on_own_devices(text))


@dataclass(frozen=True, slots=True)
class DelayedRank:
    """Effect of a rank with slower compute.

    Attributes:
        ranks: The rank and the ranks that are folded with it.
        relative_change: Relative change of the step time.
    """

    ranks: tuple[int, ...]
    relative_change: float


def slow_ranks(text: str, slower: float) -> tuple[DelayedRank, ...]:
    """Increase of the step time when one rank computes more slowly, for each set of identical ranks.

    Identical ranks are simulated as one, so all of them are slow in the simulation. They synchronize at every
    collective, so a single slow rank costs the step the same time.

    Args:
        text: The scenario's YAML.
        slower: Relative increase of compute time, e.g. 0.1 for 10 %.
    """
    _, simulated = _step_on_own_devices(text)
    program = simulated.program
    before_s = simulated.times.step_time_s
    durations_s = [
        [
            seconds * (1 + slower) if op.rank == rank and op.stream == "compute" else seconds
            for op, seconds in zip(program.ops, simulated.program_costs.durations_s, strict=True)
        ]
        for rank in program.ranks
    ]
    after_s = compile_program(program).step_times_s(durations_s)
    folded: dict[int, list[int]] = {}
    for rank, simulated_rank in enumerate(program.stands_for):
        folded.setdefault(simulated_rank, []).append(rank)
    return tuple(
        DelayedRank(tuple(folded.get(rank, [rank])), seconds / before_s - 1)
        for rank, seconds in zip(program.ranks, after_s, strict=True)
    )
