"""Time of collectives and P2P transfers: latency and bandwidth by size, algorithm and location, in closed form.

Every communication algorithm has a time in seconds: start + steps x latency + bytes / bandwidth. The fastest algorithm
is used, unless the plan prescribes one (``simplan.cost.communication.prescribed``). The library of the link inside a
node defines the available algorithms:

- ``nccl``: rings, double binary trees, reduction in the switch, each with its protocols
  (``simplan.cost.communication.nccl``);
- ``xla``: the axes of a torus (``simplan.cost.communication.torus``);
- ``gloo``: rings and trees between processes, over TCP (``simplan.cost.communication.gloo``).

The catalog has each link's fraction of datasheet bandwidth and time per step, fitted on published measurements by
``make fit``, with the remaining spread. A group uses the networks of its devices: with one rank per node that of one
device, with k ranks per node those of k devices. Groups that share a node do not compete for a network.

Sources: Patarasuk and Yuan 2009 (rings), Thakur et al. 2005 (pairwise exchange), the bus bandwidths of nccl-tests.
"""

from __future__ import annotations

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.communication.algorithm import CommAlgorithm, Pattern
from simplan.cost.communication.gloo import gloo_way
from simplan.cost.communication.nccl import nccl_ways
from simplan.cost.communication.prescribed import prescribed_ways
from simplan.cost.communication.route import Route, route_of
from simplan.cost.communication.torus import torus_way
from simplan.cost.model import CostEstimate, Provenance
from simplan.model.layer import CollectiveKind
from simplan.plan.collectives import Collectives
from simplan.program.program import Communication


def bus_factor(kind: CollectiveKind, num_ranks: int) -> float:
    """Returns the bytes that each rank sends over ``num_bytes`` (nccl-tests' ratio of bus and algorithm bandwidth)."""
    part = (num_ranks - 1) / num_ranks
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return 2 * part
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
            return part
        case CollectiveKind.BROADCAST | CollectiveKind.RING | CollectiveKind.SEND:
            return 1.0


def communication_cost(
    communication: Communication,
    cluster: ClusterSpec,
    route: Route | None = None,
    collectives: Collectives | None = None,
    server_shares: tuple[float, ...] = (),
) -> CostEstimate:
    """Estimates the time on a cluster with two tiers. A group of one rank, or a send to itself, costs nothing.

    Args:
        communication, cluster: Communication, whose ranks are devices of the cluster.
        route: Route of the ranks; None to compute it.
        collectives: Algorithms that the plan prescribes; None for the library's choice.
        server_shares: Fraction of the gradients on each parameter server; empty for equal parts.

    Raises:
        SpecError: The cluster names no link for a tier that the communication crosses.
    """
    if len(set(communication.ranks)) == 1:
        return CostEstimate.nothing("a group of one")
    route = route or route_of(communication.ranks, cluster)
    link, num_bytes = route.slowest.link, communication.num_bytes
    way = algorithm_of(communication, cluster, route, collectives, server_shares)
    relative_std, is_fitted = _relative_std(route, num_bytes, cluster), link.fitted_on is not None
    if collectives is not None and collectives.of(communication.kind) not in (None, *_OF_LIBRARIES):
        relative_std, is_fitted = max(relative_std, _UNFITTED_STD), False
    return CostEstimate.of(
        way.part(num_bytes, route.where),
        Provenance.PUBLISHED if is_fitted else Provenance.DATASHEET,
        relative_std,
        least_s=way.transfer_s(num_bytes) * route.least_share,
    )


def _relative_std(route: Route, num_bytes: float, cluster: ClusterSpec) -> float:
    """Returns the relative std; between nodes, training shares the network more than collective benchmarks do."""
    in_training = cluster.device.kernels.inter_node_std
    if route.between is None or in_training is None:
        return route.slowest.link.relative_std.of(num_bytes)
    return in_training


def algorithm_of(
    communication: Communication,
    cluster: ClusterSpec,
    route: Route | None = None,
    collectives: Collectives | None = None,
    server_shares: tuple[float, ...] = (),
) -> CommAlgorithm:
    """Returns the algorithm of two or more ranks; arguments and errors as ``communication_cost``.

    It is the fastest that the library has, or of those that the plan prescribes.
    """
    route = route or route_of(communication.ranks, cluster)
    allowed = _allowed(communication, cluster, route, collectives, server_shares)
    return min(allowed, key=lambda way: way.seconds(communication.num_bytes))


def _allowed(
    communication: Communication,
    cluster: ClusterSpec,
    route: Route,
    collectives: Collectives | None,
    server_shares: tuple[float, ...],
) -> list[CommAlgorithm]:
    name = None if collectives is None else collectives.of(communication.kind)
    if collectives is None or name is None:
        return algorithms_of(communication, cluster, route)
    if name in _OF_LIBRARIES:
        known = algorithms_of(communication, cluster, route)
        allowed = [way for way in known if way.pattern in _OF_LIBRARIES[name]]
    else:
        allowed = prescribed_ways(name, collectives, communication, route, server_shares)
    assert allowed, f"simplan.rules.collectives refuses {name} here"
    return allowed


_OF_LIBRARIES = {
    "ring": (Pattern.RING, Pattern.GLOO_RING),
    "tree": (Pattern.TREE,),
    "nvls": (Pattern.NVLS,),
    "pairwise": (Pattern.PAIRWISE,),
}
"""Algorithms that libraries choose from, by their name in a plan."""

_UNFITTED_STD = 0.25
"""Least relative standard deviation of algorithms that no library chooses, on which no published measurement was
fitted: that of a link without measurements (``LinkSpec.relative_std``)."""


def algorithms_of(
    communication: Communication, cluster: ClusterSpec, route: Route | None = None
) -> list[CommAlgorithm]:
    """Returns the algorithms of the library that the cluster's link inside nodes has, for two or more ranks."""
    route = route or route_of(communication.ranks, cluster)
    link = cluster.intra_link or route.slowest.link
    match link.library:
        case "nccl":
            return nccl_ways(communication, route)
        case "xla":
            return [torus_way(communication, route)]
        case "gloo":
            return [gloo_way(communication.kind, route)]
