"""Routes: location of the ranks of a group, and bandwidth of the links between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simplan.cluster.hardware import ClusterSpec, LinkSpec
from simplan.cluster.topology import Torus, slice_shape
from simplan.errors import Problem, SpecError


class Tier(NamedTuple):
    """A link that a group of ranks uses, and the bandwidth of large transfers on it.

    Attributes:
        pair_bytes_per_s: Bytes per second from one rank to one other.
        group_bytes_per_s: Bytes per second. Inside a node, per rank while all ranks of the node send. Between nodes,
            for all ranks of one node together, since every device has a separate share of the node's network.
        pair_efficiency, device_efficiency: Fractions of the link's datasheet bandwidth that one pair of ranks achieves,
            and a rank while all ranks of its node send.
    """

    link: LinkSpec
    latency_s: float
    pair_bytes_per_s: float
    group_bytes_per_s: float
    pair_efficiency: float
    device_efficiency: float


class Route(NamedTuple):
    """Location of a group of ranks on a cluster.

    Attributes:
        num_ranks, num_nodes: Ranks of the group, and nodes that they span.
        local: Ranks in the node with the fewest ranks of the group, which is the bottleneck.
        devices_per_slice: Devices that a link inside a node connects.
        inside: Link between ranks of a node; None if every node has one rank.
        between: Link between nodes; None for a group in one node.
        axes: Of a group on a torus, its devices along each axis on which it has several, and True if they close to a
            ring; empty for an irregular group, and without a torus.
    """

    num_ranks: int
    num_nodes: int
    local: int
    devices_per_slice: int
    inside: Tier | None
    between: Tier | None
    axes: tuple[tuple[int, bool], ...] = ()

    @property
    def slowest(self) -> Tier:
        """The tier between nodes if the group spans several, otherwise the tier inside the node."""
        tier = self.between or self.inside
        assert tier is not None, "a group of one has no route"
        return tier

    @property
    def least_share(self) -> float:
        """Smallest fraction of the datasheet bandwidth that any algorithm achieves on the slowest tier."""
        link = self.slowest.link
        return link.bandwidth_share if self.between else min(link.bandwidth_share, link.switch_share or 1.0)

    @property
    def where(self) -> str:
        """Description of the location for formulas."""
        link = self.slowest.link.id
        if self.between is None:
            return link
        if self.num_ranks == self.num_nodes * self.local:
            return f"{self.num_nodes} nodes x {self.local}, {link}"
        return f"{self.num_ranks} ranks on {self.num_nodes} nodes, {self.local} on the smallest, {link}"


def route_of(devices: Sequence[int], cluster: ClusterSpec) -> Route:
    """Returns the route of ranks on two or more devices; devices fill the nodes of the cluster in order.

    Raises:
        SpecError: The cluster names no link for a tier that the group crosses.
    """
    per_node = cluster.devices_per_node
    nodes = Counter(device // per_node for device in devices)
    local = min(nodes.values())
    inside = between = None
    if local > 1:
        link = _named(cluster.intra_link, cluster, "cluster.intra_link", "devices")
        pair, each = link.rate_of_group(2, per_node), link.rate_of_group(local, per_node)
        inside = Tier(link, link.latency_s, pair, each, pair / link.bytes_per_s, each / link.bytes_per_s)
    if len(nodes) > 1:
        link = _named(cluster.inter_link, cluster, "cluster.inter_link_gbit_per_device", "nodes")
        rate = link.rate_of_group(1, 1)
        between = Tier(link, link.latency_s, rate, local * rate, rate / link.bytes_per_s, rate / link.bytes_per_s)
    size = min(per_node, cluster.num_devices)
    axes = () if inside is None or not inside.link.torus_axes else _axes(devices, cluster, size, local)
    return Route(len(devices), len(nodes), local, size, inside, between, axes)


def _axes(devices: Sequence[int], cluster: ClusterSpec, size: int, local: int) -> tuple[tuple[int, bool], ...]:
    """Axes of the first node's devices of a group on the torus of their slice; see ``Route``."""
    link, topology = cluster.intra_link, cluster.topology
    assert link is not None
    assert link.torus_axes is not None
    shape = topology.shape if isinstance(topology, Torus) else slice_shape(size, link.torus_axes)
    node = devices[0] // cluster.devices_per_node
    own = np.array([device for device in devices if device // cluster.devices_per_node == node])
    if math.prod(shape) != size or len(own) != local:
        return ()
    places = np.unravel_index(own % cluster.devices_per_node, shape)
    sides = [len(np.unique(place)) for place in places]
    if math.prod(sides) != local:
        return ()
    wrap = max(3, link.torus_wrap or 1)
    return tuple((side, side == length and side >= wrap) for side, length in zip(sides, shape, strict=True) if side > 1)


def _named(link: LinkSpec | None, cluster: ClusterSpec, field: str, what: str) -> LinkSpec:
    if link is None:
        raise SpecError(
            Problem(
                field=field,
                rule=f"is needed, because the plan communicates between {what} of {cluster.id}",
                fix="name a link (simplan show links) or choose a plan that stays inside",
            )
        )
    return link
