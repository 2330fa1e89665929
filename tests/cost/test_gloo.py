"""What gloo sends, against bytes that were counted on the links of 2 and 4 hosts (torch 2.13)."""

from __future__ import annotations

import pytest

from simplan.catalog import link, network_link
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.machine import this_machine
from simplan.cost.communication.collectives import communication_cost
from simplan.model.layer import CollectiveKind
from simplan.program.program import Communication
from simplan.units import MIB

# Bytes a rank sent over those of the communication, headers taken off (they were 4 to 6 % of what the interfaces
# counted).
COUNTED = [
    (CollectiveKind.ALL_REDUCE, 2, 1.0),
    (CollectiveKind.ALL_REDUCE, 4, 1.5),
    (CollectiveKind.REDUCE_SCATTER, 2, 1.0),
    (CollectiveKind.REDUCE_SCATTER, 4, 1.5),
    (CollectiveKind.ALL_GATHER, 2, 0.5),
    (CollectiveKind.ALL_GATHER, 4, 0.75),
    (CollectiveKind.ALL_TO_ALL, 2, 0.5),
    (CollectiveKind.ALL_TO_ALL, 4, 0.75),
    (CollectiveKind.SEND, 2, 1.0),
]
TURNS = {
    (CollectiveKind.ALL_GATHER, 2): 1.5,
    (CollectiveKind.ALL_TO_ALL, 2): 2.0,
    (CollectiveKind.ALL_TO_ALL, 4): 4 / 3,
}


def nodes(number: int, gbit: float, ranks_per_node: int = 1) -> ClusterSpec:
    return this_machine(
        number * ranks_per_node, link("loopback"), num_nodes=number, inter_link=network_link(gbit, "tcp")
    )


def seconds(kind: CollectiveKind, cluster: ClusterSpec, num_bytes: int = 64 * MIB) -> float:
    return communication_cost(Communication(kind, num_bytes, tuple(range(cluster.num_devices))), cluster).seconds


@pytest.mark.parametrize(("kind", "ranks", "sent"), COUNTED)
def test_large_communications_take_what_their_bytes_take_on_the_wire(
    kind: CollectiveKind, ranks: int, sent: float
) -> None:
    wire_s = (
        TURNS.get((kind, ranks), 1.0) * sent * 64 * MIB * 1538 / 1448 / 50e6
    )  # 0.4 Gbit/s, headers of a frame included
    assert seconds(kind, nodes(ranks, 0.4)) == pytest.approx(wire_s, rel=0.01)


# Medians of quiet runs of one 8 MB communication on links of 100 Mbit/s, 2026-11-22, milliseconds.
@pytest.mark.parametrize(
    ("kind", "ranks", "measured_ms"),
    [
        (CollectiveKind.ALL_REDUCE, 2, 677.75),
        (CollectiveKind.ALL_REDUCE, 4, 1012.09),
        (CollectiveKind.REDUCE_SCATTER, 2, 682.97),
        (CollectiveKind.REDUCE_SCATTER, 4, 1021.50),
        (CollectiveKind.ALL_GATHER, 2, 517.84),
        (CollectiveKind.ALL_GATHER, 4, 512.85),
        (CollectiveKind.BROADCAST, 2, 668.65),
        (CollectiveKind.BROADCAST, 4, 1978.40),
        (CollectiveKind.SEND, 2, 668.66),
    ],
)
def test_measured_communications(kind: CollectiveKind, ranks: int, measured_ms: float) -> None:
    assert seconds(kind, nodes(ranks, 0.1), 8_000_000) * 1e3 == pytest.approx(measured_ms, rel=0.05)


def test_a_ring_crosses_the_network_once_a_node() -> None:
    """Two ranks of a node have twice the network of one, and their ring leaves the node once."""
    apart, two = nodes(4, 0.4), nodes(2, 0.4, ranks_per_node=2)
    halved_s = seconds(CollectiveKind.ALL_REDUCE, apart) / 2
    assert seconds(CollectiveKind.ALL_REDUCE, two) == pytest.approx(halved_s, rel=0.01)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17])
def test_a_broadcast_is_a_tree_whose_senders_share_their_link(num_ranks: int) -> None:
    """Simulated transfer by transfer: each rank's sends begin when it has the buffer, and share its link equally."""
    has_s = {0: 0.0}
    for place in range(num_ranks):  # a rank gets the buffer from one with a smaller number
        later = [place + (1 << bit) for bit in range(8) if 1 << bit > place and place + (1 << bit) < num_ranks]
        has_s |= {child: has_s[place] + len(later) for child in later}
    assert len(has_s) == num_ranks
    alone_s = seconds(CollectiveKind.BROADCAST, nodes(2, 0.4))
    latest_s = max(has_s.values()) * alone_s
    assert seconds(CollectiveKind.BROADCAST, nodes(num_ranks, 0.4)) == pytest.approx(latest_s, rel=0.01)
