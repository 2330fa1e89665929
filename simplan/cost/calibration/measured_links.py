"""Measured collectives of a calibration beside the closed form with the catalog's links."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.machine import THIS_MACHINE
from simplan.cost.calibration.format import Calibration, CommunicationTiming
from simplan.cost.calibration.store import is_named
from simplan.cost.communication.collectives import bus_factor, communication_cost
from simplan.model.layer import CollectiveKind
from simplan.program.program import Communication


class TimedGroup(NamedTuple):
    """One collective of one group of ranks, over sizes.

    Attributes:
        num_bytes: Smallest and largest size, in bytes.
        latency_s: Measured time of the smallest size, in seconds.
        bus_bytes_per_s: Measured bus bandwidth of the largest size, as in nccl-tests.
        estimated_bytes_per_s: The closed form's bus bandwidth of the largest size; None without a cluster.
        median_ratio: Median over sizes of measured over estimated time; None without a cluster.
    """

    kind: CollectiveKind
    num_ranks: int
    num_nodes: int
    num_bytes: tuple[int, int]
    latency_s: float
    bus_bytes_per_s: float
    estimated_bytes_per_s: float | None
    median_ratio: float | None


def catalog_cluster(calibration: Calibration) -> ClusterSpec | None:
    """The catalog's cluster with the calibration's device, as many nodes as were timed; None for no such cluster."""
    name = str(calibration.environment.get("device") or "")
    num_nodes = max((timing.num_nodes for timing in calibration.communication), default=1)
    for cluster_id in catalog.names("clusters"):
        if cluster_id != THIS_MACHINE and is_named((cluster := catalog.cluster(cluster_id)).device, name):
            return catalog.cluster(cluster_id, num_nodes * cluster.devices_per_node)
    return None


def measured_collectives(calibration: Calibration, cluster: ClusterSpec | None) -> list[TimedGroup]:
    """Every collective and group of a calibration.

    Args:
        calibration: Calibration with timings of communication.
        cluster: Cluster whose links give the estimates; None for no estimates.
    """
    curves: dict[tuple[CollectiveKind, int, int], list[CommunicationTiming]] = defaultdict(list)
    for timing in calibration.communication:
        curves[timing.kind, timing.num_ranks, timing.num_nodes].append(timing)
    return [_measured(sorted(curve, key=lambda t: t.num_bytes), cluster) for curve in curves.values()]


def _measured(curve: list[CommunicationTiming], cluster: ClusterSpec | None) -> TimedGroup:
    first, last = curve[0], curve[-1]
    bus_bytes = last.num_bytes * bus_factor(last.kind, last.num_ranks)
    estimates_s = None if cluster is None else [_estimated_s(timing, cluster) for timing in curve]
    ratios = sorted(t.seconds.mean_s / s for t, s in zip(curve, estimates_s or (), strict=False))
    return TimedGroup(
        kind=last.kind,
        num_ranks=last.num_ranks,
        num_nodes=last.num_nodes,
        num_bytes=(first.num_bytes, last.num_bytes),
        latency_s=first.seconds.mean_s,
        bus_bytes_per_s=bus_bytes / last.seconds.mean_s,
        estimated_bytes_per_s=None if estimates_s is None else bus_bytes / estimates_s[-1],
        median_ratio=ratios[len(ratios) // 2] if ratios else None,
    )


def _estimated_s(timing: CommunicationTiming, cluster: ClusterSpec) -> float:
    """Closed-form seconds of a timing's group, whose nodes have equal numbers of ranks, as far as these divide."""
    ranks = timed_ranks(timing, cluster)
    return communication_cost(Communication(timing.kind, timing.num_bytes, ranks), cluster).seconds


def timed_ranks(timing: CommunicationTiming, cluster: ClusterSpec) -> tuple[int, ...]:
    """Ranks on a cluster that stand for the group of a timing: the first devices of the first nodes."""
    per_node = cluster.devices_per_node
    local = min(per_node, -(-timing.num_ranks // timing.num_nodes))
    ranks = tuple(node * per_node + place for node in range(timing.num_nodes) for place in range(local))
    return ranks[: timing.num_ranks]
