"""Order of nodes that follows the network: nodes of one switch are neighbors, so that rings leave it once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simplan.cluster.hardware import ClusterSpec
from simplan.network.build import fabric_of
from simplan.network.fabric import Fabric
from simplan.plan.hostfile import nodes_of

_MAX_NODES = 1024
"""Nodes of a free graph that are ordered: all pairs of them have a path."""


def nodes_by_network(cluster: ClusterSpec) -> tuple[int, ...]:
    """Nodes of the job so that those below one switch follow each other, from node 0 on.

    Where switches form no levels, as in a free graph, the next node is the nearest one, by the links of the path.
    """
    fabric, nodes = fabric_of(cluster), cluster.fabric_nodes
    devices = [node * cluster.devices_per_node for node in nodes]
    domains = [domain for name, domain in reversed(fabric.levels) if name != "node"]
    if domains:
        keys = np.stack([domain[devices] for domain in reversed(domains)])
        return tuple(np.lexsort(keys).tolist())
    if len(nodes) > _MAX_NODES:
        return tuple(range(len(nodes)))
    return _nearest_first(fabric, devices)


def _nearest_first(fabric: Fabric, devices: Sequence[int]) -> tuple[int, ...]:
    rest = dict.fromkeys(range(1, len(devices)))
    order = [0]
    while rest:
        here = devices[order[-1]]
        order.append(min(rest, key=lambda node: len(fabric.path(here, devices[node]))))
        del rest[order[-1]]
    return tuple(order)


def devices_by_network(cluster: ClusterSpec, devices: Sequence[int] | None = None) -> tuple[int, ...]:
    """Device of every rank with the nodes in the order of the network; each takes the ranks of another one.

    Args:
        devices: Devices of the ranks now; None for those of their own numbers.
    """
    per_node = cluster.devices_per_node
    devices = range(cluster.num_devices) if devices is None else devices
    there = dict(zip(nodes_of(devices, per_node), nodes_by_network(cluster), strict=True))
    return tuple(there[device // per_node] * per_node + device % per_node for device in devices)
