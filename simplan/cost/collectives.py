"""Time of collectives and messages: latency and bandwidth, in closed form."""

from __future__ import annotations

from collections import Counter

from simplan.cost.base import Price, Provenance
from simplan.errors import Problem, SpecError
from simplan.program.program import Message
from simplan.spec.hardware import ClusterSpec, LinkSpec
from simplan.units import format_bytes, format_rate, format_time

__all__ = ["LINK_EFFICIENCY", "message_price", "ring_all_reduce_s", "send_s"]

LINK_EFFICIENCY = 0.75
"""Share of a link's datasheet bandwidth that large messages reach. Published nccl-tests runs of ring all-reduce reach
0.66 to 0.81 of NVLink 3 to 5 with 2 to 8 devices; reduction in the switch (NVLS) and InfiniBand reach more."""

_RELATIVE_STD = 0.25


def ring_all_reduce_s(num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Ring all-reduce: 2 (n-1) steps of num_bytes / n each (Patarasuk and Yuan 2009).

    Args:
        num_bytes: Bytes of the buffer on each rank.
        num_ranks: Ranks n in the ring.
        bytes_per_s: What one rank sends to its neighbour.
        latency_s: Of one step.
    """
    steps = 2 * (num_ranks - 1)
    return steps * (latency_s + num_bytes / num_ranks / bytes_per_s)


def send_s(num_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """One message: latency plus bytes over bandwidth."""
    return latency_s + num_bytes / bytes_per_s


def message_price(message: Message, cluster: ClusterSpec) -> Price:
    """Price on a cluster of two tiers.

    A group inside a node uses the intra-node link. A group over several nodes uses the network of all its devices in
    a node at once, so its ring runs at the smaller of the intra-node bandwidth and k times a device's network
    bandwidth, where k is the number of its devices per node; latency adds up over both tiers.

    Raises:
        SpecError: The cluster names no link for a tier that the message crosses.
    """
    nodes = Counter(cluster.node_of(rank) for rank in message.ranks)
    n = len(message.ranks)
    local = min(nodes.values())  # the ring is as slow as the node with the fewest devices in it
    if message.kind == "send":
        link = _link(cluster, crosses=len(nodes) > 1)
        rate = link.bytes_per_s * LINK_EFFICIENCY
        seconds = send_s(message.num_bytes, rate, link.latency_s)
        formula = f"{format_time(link.latency_s)} + {format_bytes(message.num_bytes)} / {format_rate(rate)} ({link.id})"
    elif message.kind != "all_reduce":
        raise AssertionError(f"no price for {message.kind}")
    elif len(nodes) == 1:
        link = _link(cluster, crosses=False)
        rate = link.bytes_per_s * LINK_EFFICIENCY
        seconds = ring_all_reduce_s(message.num_bytes, n, rate, link.latency_s)
        formula = (
            f"2 ({n}-1) x ({format_time(link.latency_s)} + "
            f"{format_bytes(message.num_bytes)} / {n} / {format_rate(rate)}) ({link.id})"
        )
    else:
        network = _link(cluster, crosses=True)
        rate = network.bytes_per_s * local
        latency_s = 2 * (len(nodes) - 1) * network.latency_s
        if local > 1:
            inner = _link(cluster, crosses=False)
            rate = min(rate, inner.bytes_per_s)
            latency_s += 2 * (local - 1) * inner.latency_s
        rate *= LINK_EFFICIENCY
        seconds = latency_s + ring_all_reduce_s(message.num_bytes, n, rate, 0.0)
        formula = (
            f"{format_time(latency_s)} + 2 ({n}-1)/{n} x {format_bytes(message.num_bytes)} / {format_rate(rate)} "
            f"({len(nodes)} nodes x {local}, {network.id})"
        )
    return Price(seconds, Provenance.DATASHEET, _RELATIVE_STD, formula)


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
