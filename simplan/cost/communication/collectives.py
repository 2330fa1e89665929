"""Time of collectives and messages: latency and bandwidth by size, algorithm and place, in closed form.

Every way to carry a message out has a time in seconds: start + steps x latency + bytes / bandwidth. The fastest is
taken. Which ways there are is said by the library that runs on the link inside a node:

- ``nccl``: rings, double binary trees, reduction in the switch, each with its protocols
  (``simplan.cost.communication.nccl``);
- ``xla``: the axes of a torus (``simplan.cost.communication.torus``);
- ``gloo``: rings and trees between processes, over TCP (``simplan.cost.communication.gloo``).

How much of a datasheet's bandwidth a link reaches and how long a step takes is in the catalogue, fitted on published
measurements by ``make fit``, with the spread that remains. Groups that share a node have a device's
network each: one rank in each node uses the network of one device, k of them that of k devices.

Sources: Patarasuk and Yuan 2009 (rings), Thakur et al. 2005 (pairwise exchange), the bus bandwidths of nccl-tests.
"""

from __future__ import annotations

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.base import Price, Provenance
from simplan.cost.communication.algorithm import CommAlgorithm
from simplan.cost.communication.gloo import gloo_way
from simplan.cost.communication.nccl import nccl_ways
from simplan.cost.communication.route import Route, route_of
from simplan.cost.communication.torus import torus_way
from simplan.model.layer import CollectiveKind
from simplan.program.program import Message

__all__ = ["bus_factor", "message_price", "message_s", "send_s"]


def bus_factor(kind: CollectiveKind, num_ranks: int) -> float:
    """Part of ``num_bytes`` that each rank sends (nccl-tests' factor between algorithm and bus bandwidth).

    Args:
        kind: How bytes move.
        num_ranks: Ranks in the group; of a send, two.
    """
    part = (num_ranks - 1) / num_ranks
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return 2 * part
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
            return part
        case CollectiveKind.BROADCAST | CollectiveKind.RING | CollectiveKind.SEND:
            return 1.0


def send_s(num_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """One message: latency plus bytes over bandwidth."""
    return latency_s + num_bytes / bytes_per_s


def message_price(message: Message, cluster: ClusterSpec, route: Route | None = None) -> Price:
    """Price on a cluster of two tiers. A group of one costs nothing.

    Args:
        message: Its ranks are devices of the cluster.
        cluster: Where they are.
        route: That of its ranks, where it is known already.

    Raises:
        SpecError: The cluster names no link for a tier that the message crosses.
    """
    if len(message.ranks) == 1:
        return Price(0.0, Provenance.DATASHEET, 0.0, "a group of one")
    route = route or route_of(message.ranks, cluster)
    link, num_bytes = route.slowest.link, message.num_bytes
    way = min(_ways(message, route, cluster), key=lambda way: way.seconds(num_bytes))
    return Price(
        way.seconds(num_bytes),
        Provenance.DATASHEET if link.fitted_on is None else Provenance.PUBLISHED,
        _relative_std(route, num_bytes, cluster),
        way.formula(num_bytes, route.where),
    )


def _relative_std(route: Route, num_bytes: float, cluster: ClusterSpec) -> float:
    """How sure a price is: between nodes training shares the network with more than benchmarks of collectives do."""
    in_training = cluster.device.kernels.between_nodes_std
    if route.between is None or in_training is None:
        return route.slowest.link.relative_std.of(num_bytes)
    return in_training


def message_s(message: Message, cluster: ClusterSpec, route: Route | None = None) -> float:
    """Seconds of ``message_price``, without what it says; the same arguments and errors."""
    if len(message.ranks) == 1:
        return 0.0
    route = route or route_of(message.ranks, cluster)
    return min(way.seconds(message.num_bytes) for way in _ways(message, route, cluster))


def _ways(message: Message, route: Route, cluster: ClusterSpec) -> list[CommAlgorithm]:
    """A cluster has one library: that of its link inside nodes."""
    link = cluster.intra_link or route.slowest.link
    match link.library:
        case "nccl":
            return nccl_ways(message, route)
        case "xla":
            return [torus_way(message, route)]
        case "gloo":
            return [gloo_way(message.kind, route)]
