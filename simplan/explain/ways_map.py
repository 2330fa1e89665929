"""Step time over bandwidth for every way to train: where which way is the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict.sensitivity import Resource, improved
from simplan.predict.step_summary import summarize_step
from simplan.units import format_rate, format_time

WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole gradients": {},
    "fp16 gradients": {"compression": "fp16"},
    "int8 gradients": {"compression": "int8"},
    "one-bit gradients": {"compression": "one_bit"},
    "PowerSGD, rank 4": {"compression": {"kind": "powersgd", "rank": 4}},
    "top-k, 1 %": {"compression": {"kind": "top_k", "ratio": 0.01}},
    "parameter servers": {"replication": {"kind": "parameter_server"}},
    "parameter servers, staleness 4": {"replication": {"kind": "parameter_server", "staleness": 4}},
    "Local SGD, 8 steps": {"replication": {"kind": "local_sgd", "inner_steps": 8}},
    "DiLoCo, 100 steps": {"replication": {"kind": "diloco", "inner_steps": 100}},
    "DiLoCo, 100 steps, int4": {"replication": {"kind": "diloco", "inner_steps": 100, "outer": {"dtype": "int4"}}},
    "streaming DiLoCo, 100 steps": {"replication": {"kind": "streaming_diloco", "inner_steps": 100}},
}
"""Ways by name, with their plan fields; all are those of papers. Every node has a parameter server."""

_FACTORS = tuple(10 ** (place / 3) for place in range(-9, 1))
"""Bandwidths, as factors of that of the scenario: three to a decade, from a thousandth on."""


@dataclass(frozen=True, slots=True)
class WayCurve:
    """Step times of one way.

    Attributes:
        name: Name of the way.
        plan: Its plan.
        step_times_s: By bandwidth, seconds of a step; empty for a plan that is refused.
        refused: Reason for which there is none; empty for none.
    """

    name: str
    plan: ParallelPlan
    step_times_s: tuple[float, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class WaysMap:
    """Step times of all ways over the bandwidth of the slowest link between replicas.

    Attributes:
        name: Scenario name.
        link: Words for the link.
        bytes_per_s: Bandwidths of a device on it, ascending; the last is that of the scenario.
        curves: All ways; those with step times first.
    """

    name: str
    link: str
    bytes_per_s: tuple[float, ...]
    curves: tuple[WayCurve, ...]

    @property
    def drawn(self) -> tuple[WayCurve, ...]:
        """Ways with step times."""
        return tuple(curve for curve in self.curves if curve.step_times_s)

    def fastest(self, place: int) -> WayCurve:
        """The fastest way at a bandwidth; whole gradients where no other is faster."""
        return min(self.drawn, key=lambda curve: curve.step_times_s[place])

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        return {
            "schema_version": 1,
            "kind": "ways_map",
            "name": self.name,
            "link": self.link,
            "bytes_per_s": list(self.bytes_per_s),
            "ways": [
                {
                    "name": curve.name,
                    "plan": curve.plan.model_dump(mode="json"),
                    "step_times_s": list(curve.step_times_s),
                    "refused": curve.refused,
                }
                for curve in self.curves
            ],
        }


def ways_map(job: Job, name: str) -> WaysMap:
    """Predict a job with every way to train, at bandwidths from that of its cluster down to a thousandth of it.

    A plan without replicas gets one for each node, since ways are about replicas.

    Raises:
        NotModelledError: The cluster is this machine, whose links have timings and no bandwidth.
        SpecError: The job has one device, or no way of it can be predicted.
    """
    if job.cluster.cores_per_node is not None:
        rule = "has timings of its links, and no bandwidth to vary"
        raise NotModelledError(Problem(field="cluster.preset", value=job.cluster.id, rule=rule, fix="use a cluster"))
    plan = _with_replicas(job)
    crosses = job.cluster.inter_link is not None and job.cluster.num_nodes > 1
    resource = Resource.INTER_LINK if crosses else Resource.INTRA_LINK
    slower = [improved(job.cluster, resource, factor) for factor in _FACTORS]
    clusters = [cluster for cluster in slower if cluster is not None]
    link = job.cluster.inter_link if crosses else job.cluster.intra_link
    if link is None or not clusters or plan.dp_replicate == 1:
        rule = "has no replicas with a link between them, and ways to train are about those"
        raise SpecError(Problem(field="plan", value=repr(job.plan), rule=rule, fix="use dp_replicate above 1"))
    curves = []
    for way, fields in WAYS.items():
        try:
            of_way = plan.with_changes(**{"replication": None, "compression": None, **_with_servers(fields, job)})
            jobs = [replace(job, cluster=cluster, plan=of_way) for cluster in clusters]
            times = tuple(summarize_step(changed).step_time_s for changed in jobs)
            curves.append(WayCurve(way, of_way, times))
        except SpecError as error:
            curves.append(WayCurve(way, plan, (), error.sentences))
    curves.sort(key=lambda curve: not curve.step_times_s)
    rates = tuple(link.bytes_per_s * factor for factor in _FACTORS)
    words = "bandwidth between nodes" if crosses else "bandwidth within the node"
    ways = WaysMap(name, words, rates, tuple(curves))
    if not ways.drawn:
        raise SpecError(Problem(field="plan", rule=curves[0].refused, fix="change the plan"))
    return ways


def _with_servers(fields: Mapping[str, Any], job: Job) -> Mapping[str, Any]:
    """Plan fields of a way, with a parameter server on every node."""
    replication = fields.get("replication", {})
    if replication.get("kind") != "parameter_server":
        return fields
    return {**fields, "replication": {**replication, "servers": job.cluster.num_nodes}}


def _with_replicas(job: Job) -> ParallelPlan:
    """The plan of a job; one without replicas gets one for each node."""
    plan, nodes = job.plan, job.cluster.num_nodes
    if plan.dp_replicate > 1 or plan.dp_shard % nodes or nodes == 1:
        return plan
    left = plan.dp_shard // nodes
    return plan.with_changes(dp_replicate=nodes, dp_shard=left, zero_stage=plan.zero_stage if left > 1 else 0)


def ways_lines(ways: WaysMap) -> Iterator[str]:
    """Lines of text: step times by bandwidth, and where which way is the fastest."""
    places = range(0, len(ways.bytes_per_s), 3) if len(ways.bytes_per_s) % 3 == 1 else range(len(ways.bytes_per_s))
    width = max(len(curve.name) for curve in ways.drawn)
    yield f"{ways.name}: step time over {ways.link}, per device"
    heads = [format_rate(ways.bytes_per_s[place]) for place in places]
    columns = [max(len(head), 9) for head in heads]
    yield "  " + " " * width + "".join(f"  {head:>{column}}" for head, column in zip(heads, columns, strict=True))
    for curve in ways.drawn:
        cells = [format_time(curve.step_times_s[place]) for place in places]
        row = "".join(f"  {cell:>{column}}" for cell, column in zip(cells, columns, strict=True))
        yield f"  {curve.name:{width}}{row}"
    yield ""
    fastest = [ways.fastest(place).name for place in range(len(ways.bytes_per_s))]
    yield "Fastest step (not the fewest samples: ways differ in those)"
    start = 0
    for place in range(1, len(fastest) + 1):
        if place == len(fastest) or fastest[place] != fastest[start]:
            ends = [format_rate(ways.bytes_per_s[end]) for end in (start, place - 1)]
            yield f"  {' to '.join(dict.fromkeys(ends))}: {fastest[start]}"
            start = place
    refused = [curve for curve in ways.curves if curve.refused]
    if refused:
        yield ""
        yield "Not drawn"
        yield from (f"  {curve.name}: {curve.refused}" for curve in refused)
