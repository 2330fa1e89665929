"""Failures of a job's parts, from its reliability: units of a node, and nodes that a failure takes away."""

from __future__ import annotations

from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import AnyTopology, Dragonfly, FatTree, LeafSpine, Rail, Sites
from simplan.errors import Problem, SpecError
from simplan.goodput.sections import Cause, Recovery, Reliability, Unit
from simplan.goodput.setup import CauseSetup

HOUR_S = 3600.0


def causes_of(reliability: Reliability, recovery: Recovery, cluster: ClusterSpec) -> tuple[CauseSetup, ...]:
    """Failures by cause. Links are those of network cards: a job on one node has none.

    Raises:
        SpecError: A cause takes a rack or a pod away, and the topology of the cluster has none.
    """
    problems = []
    for number, cause in enumerate(reliability.causes):
        if _num_nodes(cause, cluster) is None:
            topology = cluster.topology
            has = "the cluster has no topology" if topology is None else f"topology {topology.kind} has none"
            rule, fix = f"takes all nodes of a {cause.scope} away, and {has}", "describe cluster.topology"
            field, value = f"reliability.causes.{number}.scope", f'"{cause.scope}"'
            problems.append(Problem(field=field, value=value, rule=rule, fix=f"{fix}, or use scope: node"))
    if problems:
        raise SpecError(problems)
    return tuple(
        _cause(cause, reliability, recovery, cluster)
        for cause in reliability.all_causes
        if cause.per != "link" or cluster.num_nodes > 1
    )


def _cause(cause: Cause, reliability: Reliability, recovery: Recovery, cluster: ClusterSpec) -> CauseSetup:
    detected = cause.detected or reliability.detected
    units: dict[Unit, float] = {
        "device": cluster.ranks_per_node,
        "node": 1,
        "link": cluster.network_ports_per_node,
        "job": 0,
    }
    return CauseSetup(
        name=cause.name,
        units_per_node=units[cause.per],
        mtbf_s=HOUR_S * cause.mtbf_h,
        shape=cause.shape,
        age_s=HOUR_S * cause.age_h,
        num_nodes=_num_nodes(cause, cluster) or 0,
        planned=cause.planned,
        at_once=detected.at_once,
        timeout=detected.timeout,
        repair_s=HOUR_S * (recovery.repair_h if cause.repair_h is None else cause.repair_h),
    )


def _num_nodes(cause: Cause, cluster: ClusterSpec) -> int | None:
    """Nodes of the job that are lost together; None if the cluster has no such group."""
    if cause.scope in ("process", "node"):
        return int(cause.scope == "node")
    rack, pod = _groups(cluster.topology, cluster.network_ports_per_node)
    number = rack if cause.scope == "rack" else pod
    return None if number is None else min(number, cluster.num_nodes)


def _groups(topology: AnyTopology | None, cards: int) -> tuple[int | None, int | None]:
    """Nodes of a rack (one leaf switch, router or rail group) and of a pod (also a group of routers, or a site)."""
    match topology:
        case LeafSpine(nodes_per_leaf=rack, leaves_per_pod=leaves):
            return rack, None if leaves is None else rack * leaves
        case Rail(nodes_per_group=rack):
            return rack, None
        case FatTree():
            rack = max(1, (topology.radix - topology.uplinks) // cards)
            return rack, None if topology.levels == 2 else rack * (topology.radix // 2)
        case Dragonfly(nodes_per_router=rack, routers_per_group=routers):
            return rack, rack * routers
        case Sites():
            return _groups(topology.inside, cards)[0], topology.nodes_per_site
        case _:
            return None, None
