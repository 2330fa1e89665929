"""Time of collectives and messages: latency and bandwidth, in closed form.

With n ranks, B bytes (``CollectiveKind`` says which), a bandwidth and a latency:

========================== ======================================================
all_gather, reduce_scatter once round the ring: (n-1) x (latency + B / n / bandwidth)
all_reduce                 twice round the ring, a reduce-scatter and an all-gather
broadcast                  pipelined along the ring: (n-1) x latency + B / bandwidth
all_to_all                 pairwise: (n-1) exchanges of B / n each
ring, send                 one hop: latency + B / bandwidth
========================== ======================================================

Sources: Patarasuk and Yuan 2009 (rings), Thakur et al. 2005 (pairwise exchange), the bus bandwidths of nccl-tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from simplan.cost.base import Price, Provenance
from simplan.errors import Problem, SpecError
from simplan.program.program import Message
from simplan.spec.hardware import ClusterSpec, LinkSpec
from simplan.spec.layer import CollectiveKind
from simplan.units import format_bytes, format_rate, format_time

__all__ = ["LINK_EFFICIENCY", "bus_factor", "message_price", "ring_s", "send_s"]

LINK_EFFICIENCY = 0.75
"""Share of a link's datasheet bandwidth that large messages reach. Published nccl-tests runs of ring all-reduce reach
0.66 to 0.81 of NVLink 3 to 5 with 2 to 8 devices; reduction in the switch (NVLS) and InfiniBand reach more."""

_RELATIVE_STD = 0.25
_LAPS = {
    CollectiveKind.ALL_REDUCE: 2,
    CollectiveKind.ALL_GATHER: 1,
    CollectiveKind.REDUCE_SCATTER: 1,
    CollectiveKind.BROADCAST: 1,
}


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


def ring_s(num_laps: int, num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """A ring collective: in each lap n-1 steps of num_bytes / n (Patarasuk and Yuan 2009).

    Args:
        num_laps: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather.
        num_bytes: Bytes of the buffer.
        num_ranks: Ranks n in the ring.
        bytes_per_s: What one rank sends to its neighbour.
        latency_s: Of one step.
    """
    steps = num_laps * (num_ranks - 1)
    return steps * (latency_s + num_bytes / num_ranks / bytes_per_s)


def send_s(num_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """One message: latency plus bytes over bandwidth."""
    return latency_s + num_bytes / bytes_per_s


def message_price(message: Message, cluster: ClusterSpec) -> Price:
    """Price on a cluster of two tiers.

    A group inside a node uses the intra-node link. A group over several nodes uses the network of all its devices in
    a node at once, so its rings run at the smaller of the intra-node bandwidth and k times a device's network
    bandwidth, where k is the number of its devices per node; latency adds up over both tiers. In an all-to-all every
    device sends what leaves its node over its own network, while the rest goes over the intra-node link. A hop of a
    ``ring`` and a send have one device's bandwidth. A group of one costs nothing.

    Raises:
        SpecError: The cluster names no link for a tier that the message crosses.
    """
    if len(message.ranks) == 1:
        return Price(0.0, Provenance.DATASHEET, 0.0, "a group of one")
    nodes = Counter(cluster.node_of(rank) for rank in message.ranks)
    # the ring is as slow as the node with the fewest devices in it
    route = _Route(cluster, len(message.ranks), len(nodes), min(nodes.values()))
    match message.kind:
        case CollectiveKind.SEND | CollectiveKind.RING:
            seconds, formula = _hop(message, route)
        case CollectiveKind.ALL_TO_ALL:
            seconds, formula = _all_to_all(message, route)
        case _:
            seconds, formula = _round_the_ring(message, route)
    return Price(seconds, Provenance.DATASHEET, _RELATIVE_STD, formula)


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the ranks of a message are.

    Attributes:
        num_ranks, num_nodes: Of the group.
        local: Its ranks in the node that has the fewest.
    """

    cluster: ClusterSpec
    num_ranks: int
    num_nodes: int
    local: int

    @property
    def crosses(self) -> bool:
        return self.num_nodes > 1

    @property
    def inner(self) -> LinkSpec:
        return _link(self.cluster, crosses=False)

    @property
    def network(self) -> LinkSpec:
        return _link(self.cluster, crosses=True)

    @property
    def where(self) -> str:
        """For formulas."""
        return f"{self.num_nodes} nodes x {self.local}, {self.network.id}" if self.crosses else self.inner.id

    @property
    def ring_bytes_per_s(self) -> float:
        """What a rank sends on when the rings of all devices run at once."""
        if not self.crosses:
            return self.inner.bytes_per_s * LINK_EFFICIENCY
        rate = self.network.bytes_per_s * self.local
        if self.local > 1:
            rate = min(rate, self.inner.bytes_per_s)
        return rate * LINK_EFFICIENCY

    @property
    def lap_hops(self) -> tuple[tuple[int, LinkSpec], ...]:
        """Hops of one lap, by link: inside a node and, hierarchically, between nodes."""
        if not self.crosses:
            return ((self.num_ranks - 1, self.inner),)
        between = (self.num_nodes - 1, self.network)
        return (between,) if self.local == 1 else (between, (self.local - 1, self.inner))


def _hop(message: Message, route: _Route) -> tuple[float, str]:
    """Neighbour to neighbour; of a ring's hops the slowest counts."""
    link = route.network if route.crosses else route.inner
    rate = link.bytes_per_s * LINK_EFFICIENCY
    return (
        send_s(message.num_bytes, rate, link.latency_s),
        f"{format_time(link.latency_s)} + {format_bytes(message.num_bytes)} / {format_rate(rate)} ({link.id})",
    )


def _round_the_ring(message: Message, route: _Route) -> tuple[float, str]:
    """All-reduce, all-gather, reduce-scatter, and broadcast, whose buffer passes every rank whole."""
    laps, num_bytes, n, rate = _LAPS[message.kind], message.num_bytes, route.num_ranks, route.ring_bytes_per_s
    latency_s = laps * sum(hops * link.latency_s for hops, link in route.lap_hops)
    hops = " + ".join(f"{laps * hops} x {format_time(link.latency_s)}" for hops, link in route.lap_hops)
    if message.kind is CollectiveKind.BROADCAST:
        seconds, factor = send_s(num_bytes, rate, latency_s), ""
    else:
        seconds = latency_s + ring_s(laps, num_bytes, n, rate, 0.0)
        factor = f"{'2 ' if laps == 2 else ''}({n}-1)/{n} x "
    return seconds, f"{hops} + {factor}{format_bytes(num_bytes)} / {format_rate(rate)} ({route.where})"


def _all_to_all(message: Message, route: _Route) -> tuple[float, str]:
    """Pairwise: every rank sends one n-th to every other; both tiers carry their part at the same time."""
    n, num_bytes = route.num_ranks, message.num_bytes
    peers = ((route.local - 1, False), (n - route.local, True))
    tiers = []
    for num_peers, crosses in peers:
        if num_peers:
            link = route.network if crosses else route.inner
            rate = link.bytes_per_s * LINK_EFFICIENCY
            moved = f"{num_peers}/{n} x {format_bytes(num_bytes)} / {format_rate(rate)}"
            text = f"{num_peers} x {format_time(link.latency_s)} + {moved} ({link.id})"
            tiers.append((num_peers * (link.latency_s + num_bytes / n / rate), text))
    seconds, formula = max(tiers)
    return seconds, formula


def _link(cluster: ClusterSpec, *, crosses: bool) -> LinkSpec:
    link = cluster.inter_link if crosses else cluster.intra_link
    if link is None:
        field, what = ("cluster.inter_link_gbit_per_device", "nodes") if crosses else ("cluster.intra_link", "devices")
        raise SpecError(
            Problem(
                field=field,
                rule=f"is needed, because the plan sends messages between {what} of {cluster.id}",
                fix="name a link (simplan show links) or choose a plan that stays inside",
            )
        )
    return link
