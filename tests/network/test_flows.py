"""Flows of communication: equal to the closed forms on a network with two tiers, and complete for every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.cluster.hardware import ClusterSpec, DeviceSpec, LinkSpec
from simplan.cost.communication.algorithm import CommAlgorithm, Pattern
from simplan.cost.communication.collectives import algorithms_of
from simplan.model.layer import CollectiveKind, ExpertDraw
from simplan.network.flows import Flows, flows_of
from simplan.program.program import Communication

GB = 10**9
US = 1e-6
NUM_LOCAL = 8
INSIDE = LinkSpec(id="inside", bytes_per_s=400 * GB, latency_s=2 * US, bandwidth_share=0.8, switch_share=0.7)
BETWEEN = LinkSpec(id="between", bytes_per_s=50 * GB, latency_s=20 * US, bandwidth_share=0.9)
GLOO = LinkSpec(id="loop", bytes_per_s=4 * GB, latency_s=1e-4, bandwidth_share=0.5, library="gloo")
ETHERNET = LinkSpec(id="ethernet", bytes_per_s=GB, latency_s=2e-4, bandwidth_share=0.9, library="gloo")


def cluster(*, inside: LinkSpec = INSIDE, between: LinkSpec = BETWEEN) -> ClusterSpec:
    return ClusterSpec(
        id="test",
        device=DeviceSpec(id="d"),
        devices_per_node=NUM_LOCAL,
        num_devices=64 * NUM_LOCAL,
        intra_link=inside,
        inter_link=between,
    )


class TwoTiers:
    """Every device has a link to the switch of its node and a network card, each in two directions.

    Args:
        shared: The devices of a node share one card, as fast as theirs together.
    """

    def __init__(self, spec: ClusterSpec, *, shared: bool = False) -> None:
        self.spec, self.shared = spec, shared

    def switch_of(self, devices: Sequence[int], *, inside_node: bool) -> int:
        [node] = {self.spec.node_of(device) for device in devices}
        assert inside_node
        return self.spec.num_devices + node

    def seconds(self, way: CommAlgorithm, flows: Flows, num_bytes: float) -> dict[str, float]:
        """Busy seconds of the busiest link of each tier."""
        assert self.spec.intra_link is not None
        assert self.spec.inter_link is not None
        loads: defaultdict[tuple[str, str, int], float] = defaultdict(float)
        for source, destination, share in flows.each():
            ends = [(end, way) for end, way in ((source, "out"), (destination, "in")) if end < self.spec.num_devices]
            nodes = {self.spec.node_of(end) for end, _ in ends}
            tier = "inside" if len(nodes) == 1 else "between"
            for end, direction in ends:
                card = self.spec.node_of(end) if self.shared and tier == "between" else end
                loads[tier, direction, card] += share * num_bytes
        inside, between = self.spec.intra_link.bytes_per_s, self.spec.inter_link.bytes_per_s
        cards = NUM_LOCAL if self.shared else 1
        rates = {"inside": way.inside * inside, "between": way.between * between * cards}
        found = {"inside": 0.0, "between": 0.0}
        for (tier, _, _), load in loads.items():
            found[tier] = max(found[tier], load / rates[tier])
        return found


def group(num_nodes: int, num_local: int) -> tuple[int, ...]:
    """Equally many ranks on each node."""
    return tuple(NUM_LOCAL * node + place for node in range(num_nodes) for place in range(num_local))


GROUPS = st.builds(group, st.integers(1, 12), st.integers(1, NUM_LOCAL)).filter(lambda ranks: len(ranks) > 1)
BYTES = st.integers(1, 10**10)


def busiest(
    communication: Communication, spec: ClusterSpec, *, shared: bool = False
) -> list[tuple[CommAlgorithm, dict[str, float]]]:
    """All algorithms with the busy seconds of their busiest links."""
    network = TwoTiers(spec, shared=shared)
    return [
        (way, network.seconds(way, flows_of(way, communication, communication.ranks, spec, network), communication[1]))
        for way in algorithms_of(communication, spec)
    ]


@pytest.mark.parametrize("kind", CollectiveKind)
@given(ranks=GROUPS, num_bytes=BYTES)
def test_busiest_link_takes_the_transfer_time_of_nccl(
    kind: CollectiveKind, ranks: tuple[int, ...], num_bytes: int
) -> None:
    members = (ranks[0], ranks[-1]) if kind is CollectiveKind.SEND else ranks
    for way, seconds in busiest(Communication(kind, num_bytes, members), cluster()):
        transfer_s = way.transfer_s(num_bytes)
        if way.pattern in (Pattern.TREE, Pattern.NVLS) and len({rank // NUM_LOCAL for rank in ranks}) == 3:
            # no node of the two trees over three nodes has more than three edges, where the closed form counts four
            assert 3 / 4 * transfer_s * (1 - 1e-9) <= max(seconds.values()) <= transfer_s * (1 + 1e-9), way
        else:
            assert max(seconds.values()) == pytest.approx(transfer_s, rel=1e-9), way


@given(num_nodes=st.integers(2, 8), num_local=st.integers(2, NUM_LOCAL), num_bytes=BYTES, top_k=st.integers(1, 8))
def test_busiest_link_takes_the_transfer_time_of_expert_dispatch(
    num_nodes: int, num_local: int, num_bytes: int, top_k: int
) -> None:
    ranks, draw = group(num_nodes, num_local), ExpertDraw(num_nodes * num_local * 8, top_k)
    for way, seconds in busiest(Communication(CollectiveKind.ALL_TO_ALL, num_bytes, ranks, draw), cluster()):
        assert way.pattern is Pattern.ONCE_PER_NODE
        assert max(seconds.values()) == pytest.approx(way.transfer_s(num_bytes), rel=1e-9), way


@pytest.mark.parametrize("kind", CollectiveKind)
@given(num_nodes=st.integers(1, 6), num_bytes=BYTES)
def test_no_link_takes_more_than_the_transfer_time_of_gloo(
    kind: CollectiveKind, num_nodes: int, num_bytes: int
) -> None:
    ranks = group(num_nodes, NUM_LOCAL)
    ranks = (ranks[0], ranks[-1]) if kind is CollectiveKind.SEND else ranks
    spec = cluster(inside=GLOO, between=ETHERNET)
    [(way, seconds)] = busiest(Communication(kind, num_bytes, ranks), spec, shared=True)
    transfer_s, most_s = way.transfer_s(num_bytes), max(seconds.values())
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.RING, CollectiveKind.SEND) and num_nodes > 1:
        assert 0 < most_s <= transfer_s * (1 + 1e-9)  # rounds of a tree; hops that have the card for themselves
    elif kind is CollectiveKind.BROADCAST:
        assert most_s == pytest.approx(3 / 6 * transfer_s)  # the root sends in each of 3 rounds; 3 + 2 + 1 in sequence
    else:
        assert most_s == pytest.approx(transfer_s, rel=1e-9)
