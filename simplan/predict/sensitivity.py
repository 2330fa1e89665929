"""Sensitivity of the step time to each hardware rate, from a 1% improvement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec, LinkSpec
from simplan.cost.program_costs import estimate_program
from simplan.job import Job
from simplan.predict.background import background_steps
from simplan.predict.build import cost_model
from simplan.predict.simulated import EFFECTS, Effect, Simulated, affected_costs
from simplan.prediction import Prediction
from simplan.sim.compiled import compile_program

_BETTER = 1.01
_FIXED = EFFECTS - {Effect.JITTER}
"""Effects that better hardware changes; the factors of jitter stay those of the simulated step."""


class Resource(StrEnum):
    """A hardware rate."""

    COMPUTE = "compute"
    MEMORY_BANDWIDTH = "memory_bandwidth"
    INTRA_LINK = "intra_link"
    INTER_LINK = "inter_link"


@dataclass(frozen=True, slots=True)
class MarginalValue:
    """Effect of 1% more of a resource on the step time.

    Attributes:
        relative_change: Relative change of the step time, e.g. -0.006 for 0.6% less. Never above 0 except for rounding.
    """

    resource: Resource
    relative_change: float


def marginal_values(prediction: Prediction, simulated: Simulated) -> tuple[MarginalValue, ...]:
    """Sensitivities to the resources of the cluster, most valuable first.

    Plan, stages and order of actions stay fixed. Costs are estimated again on the better hardware, and the longest path
    is recomputed, so work that hides other work shows its true, small value.

    Raises:
        NotModelledError: Ranks share cores, so the machine has timings and no rates.
    """
    job = prediction.job
    before_s, after_s = _step_times_s(job, simulated)
    if (inner := simulated.inner) is not None:  # the mean of a round
        other_s, others_s = (0.0, dict[Resource, float]()) if inner.step is None else _step_times_s(job, inner.step)
        before_s = inner.mean(before_s, other_s)
        after_s = {name: inner.mean(seconds, others_s.get(name, 0.0)) for name, seconds in after_s.items()}
    values = [MarginalValue(name, (seconds - before_s) / before_s) for name, seconds in after_s.items()]
    return tuple(sorted(values, key=lambda value: value.relative_change))


def _step_times_s(job: Job, simulated: Simulated) -> tuple[float, dict[Resource, float]]:
    """Seconds of a step, and by resource seconds with a better one."""
    program, context = simulated.program, simulated.context
    compiled = compile_program(program, simulated.sharing)
    durations_s: dict[Resource, NDArray[np.float64]] = {}
    for resource in Resource:
        if (cluster := improved(job.cluster, resource)) is None:
            continue
        estimated = estimate_program(program, cost_model(replace(job, cluster=cluster), None))
        better = replace(context, cluster=cluster, background=background_steps(cluster), progress=None)
        costs = affected_costs(program, estimated, better, compiled, simulated.sharing, _FIXED).program_costs
        factors = 1.0 if simulated.factors is None else simulated.factors
        durations_s[resource] = costs.durations_s * factors
    times_s = compiled.step_times_s([*durations_s.values()])
    return simulated.times.step_time_s, dict(zip(durations_s, map(float, times_s), strict=True))


def improved(cluster: ClusterSpec, resource: Resource, factor: float = _BETTER) -> ClusterSpec | None:
    """Copy of a cluster with one rate multiplied by ``factor``; None if the cluster lacks the resource.

    Args:
        cluster: The cluster.
        resource: Compute means all GEMM rates, datasheet and measured, and what one SM does; links mean bandwidth, not
            latency.
        factor: Multiplier of the rate.
    """
    if cluster.node_groups:
        nodes = [(group, cluster.as_group(place)) for place, group in enumerate(cluster.node_groups)]
        better = [(group, improved(of_group, resource, factor)) for group, of_group in nodes]
        names = ("device", "intra_link", "inter_link")
        groups = tuple(
            group if of_group is None else group.model_copy(update={name: getattr(of_group, name) for name in names})
            for group, of_group in better
        )
        return cluster.model_copy(update={"node_groups": groups})
    device = cluster.device
    match resource:
        case Resource.COMPUTE:
            rates = {
                name: {dtype: rate * factor for dtype, rate in getattr(device, name).items()}
                for name in ("peak_flop_per_s", "matmul_flop_per_s")
            }
            of_sm = {name: getattr(device.kernels, name) * factor for name in ("odd_flop_per_s", "update_bytes_per_s")}
            kernels = device.kernels.model_copy(update=of_sm)
            return cluster.model_copy(update={"device": device.model_copy(update={**rates, "kernels": kernels})})
        case Resource.MEMORY_BANDWIDTH:
            if device.memory_bandwidth_bytes_per_s is None:
                return None
            faster = {"memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s * factor}
            return cluster.model_copy(update={"device": device.model_copy(update=faster)})
        case Resource.INTRA_LINK | Resource.INTER_LINK:
            link: LinkSpec | None = getattr(cluster, resource)
            if link is None:
                return None
            faster = {"bytes_per_s": link.bytes_per_s * factor}
            return cluster.model_copy(update={str(resource): link.model_copy(update=faster)})
