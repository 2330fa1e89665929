"""Where the ranks of a message are, and what the links between them reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from simplan.cluster.hardware import ClusterSpec, LinkSpec
from simplan.errors import Problem, SpecError

__all__ = ["Route", "Tier", "route_of"]


class Tier(NamedTuple):
    """A link that a group of ranks uses, and what they reach on it with large messages.

    Attributes:
        link: The link.
        latency_s: Its latency.
        pair_bytes_per_s: One rank to one other.
        group_bytes_per_s: Inside a node, each rank while all of the node send; between nodes, all ranks of one node
            together, as every device has its own share of the node's network.
    """

    link: LinkSpec
    latency_s: float
    pair_bytes_per_s: float
    group_bytes_per_s: float


class Route(NamedTuple):
    """A group of ranks on a cluster.

    Attributes:
        num_ranks, num_nodes: Of the group.
        local: Its ranks in the node that has the fewest: the one that sets the pace.
        devices_per_slice: Devices that a link inside a node joins.
        inside: Between ranks of a node; None where every node has one of them.
        between: Between nodes; None for a group in one node.
    """

    num_ranks: int
    num_nodes: int
    local: int
    devices_per_slice: int
    inside: Tier | None
    between: Tier | None

    @property
    def slowest(self) -> Tier:
        """What a message over the whole group is judged by, and two neighbours in different nodes use."""
        tier = self.between or self.inside
        assert tier is not None, "a group of one has no route"
        return tier

    @property
    def where(self) -> str:
        """For formulas."""
        link = self.slowest.link.id
        return link if self.between is None else f"{self.num_nodes} nodes x {self.local}, {link}"


def route_of(ranks: Sequence[int], cluster: ClusterSpec) -> Route:
    """Where the ranks of a message are.

    Args:
        ranks: Two or more.
        cluster: Ranks fill its nodes in order.

    Raises:
        SpecError: The cluster names no link for a tier that messages between them cross.
    """
    per_node = cluster.devices_per_node
    nodes = Counter(rank // per_node for rank in ranks)
    local = min(nodes.values())
    inside = between = None
    if local > 1:
        link = _named(cluster.intra_link, cluster, "cluster.intra_link", "devices")
        inside = Tier(link, link.latency_s, link.rate_of_group(2, per_node), link.rate_of_group(local, per_node))
    if len(nodes) > 1:
        link = _named(cluster.inter_link, cluster, "cluster.inter_link_gbit_per_device", "nodes")
        rate = link.rate_of_group(1, 1)
        between = Tier(link, link.latency_s, rate, local * rate)
    return Route(len(ranks), len(nodes), local, min(per_node, cluster.num_devices), inside, between)


def _named(link: LinkSpec | None, cluster: ClusterSpec, field: str, what: str) -> LinkSpec:
    if link is None:
        raise SpecError(
            Problem(
                field=field,
                rule=f"is needed, because the plan sends messages between {what} of {cluster.id}",
                fix="name a link (simplan show links) or choose a plan that stays inside",
            )
        )
    return link
