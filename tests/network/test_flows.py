"""Flows of communication: equal to the closed forms where no link is shared, and complete for every rank."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import LeafSpine, Pcie, Switch
from simplan.cost.communication.algorithm import CommAlgorithm, Pattern
from simplan.cost.communication.collectives import algorithms_of
from simplan.cost.communication.prescribed import prescribed_ways
from simplan.cost.communication.route import route_of
from simplan.model.layer import CollectiveKind, ExpertDraw
from simplan.network.build import fabric_of
from simplan.network.flows import flows_of
from simplan.plan.collectives import Collectives
from simplan.program.program import Communication
from tests.network.clusters import FABRICS, HOSTS, NO_SWITCH, NODES, NUM_LOCAL, NUM_NODES, SHARDING, SHARP, group, torus

GROUPS = st.builds(group, st.integers(1, NUM_NODES), st.integers(1, NUM_LOCAL)).filter(lambda ranks: len(ranks) > 1)
BYTES = st.integers(1, 10**10)


def link_bytes(way: CommAlgorithm, communication: Communication, cluster: ClusterSpec) -> dict[int, float]:
    """Bytes over each link of the fabric."""
    fabric, loads = fabric_of(cluster), defaultdict[int, float](float)
    for source, destination, share, _ in flows_of(way, communication, communication.ranks, cluster, fabric).each():
        for link in fabric.path(source, destination):
            loads[link] += share * communication.num_bytes
    return loads


def busiest(
    communication: Communication, cluster: ClusterSpec, ways: list[CommAlgorithm] | None = None
) -> list[tuple[CommAlgorithm, float, float]]:
    """Algorithms, by default those of the library, with the seconds of the busiest links inside and between nodes."""
    fabric, loads = fabric_of(cluster), []
    for way in ways or algorithms_of(communication, cluster):
        seconds = {True: 0.0, False: 0.0}
        for index, load in link_bytes(way, communication, cluster).items():
            edge = fabric.links[index]
            rate = edge.bytes_per_s * (way.inside if edge.is_inside_node else way.between)
            seconds[edge.is_inside_node] = max(seconds[edge.is_inside_node], load / rate)
        loads.append((way, seconds[True], seconds[False]))
    return loads


def members_of(kind: CollectiveKind, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks, or the first and the last of them for a send."""
    return (ranks[0], ranks[-1]) if kind is CollectiveKind.SEND else ranks


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("kind", CollectiveKind)
@given(ranks=GROUPS, num_bytes=BYTES)
def test_busiest_link_takes_the_transfer_time_of_nccl(
    fabric: str, kind: CollectiveKind, ranks: tuple[int, ...], num_bytes: int
) -> None:
    communication = Communication(kind, num_bytes, members_of(kind, ranks))
    for way, inside_s, between_s in busiest(communication, FABRICS[fabric]):
        transfer_s, most_s = way.transfer_s(num_bytes), max(inside_s, between_s)
        if way.pattern in (Pattern.TREE, Pattern.NVLS) and len({rank // NUM_LOCAL for rank in ranks}) == 3:
            # no node of the two trees over three nodes has more than three edges, where the closed form counts four
            assert 3 / 4 * transfer_s * (1 - 1e-9) <= most_s <= transfer_s * (1 + 1e-9), way
        else:
            assert most_s == pytest.approx(transfer_s, rel=1e-9), way


@pytest.mark.parametrize("kind", [kind for kind in CollectiveKind if kind is not CollectiveKind.SEND])
@given(ranks=st.sets(st.integers(0, NODES.num_devices - 1), min_size=2, max_size=24), num_bytes=BYTES)
def test_busiest_link_of_an_uneven_group_takes_the_transfer_time(
    kind: CollectiveKind, ranks: set[int], num_bytes: int
) -> None:
    """Chains of trees in nodes with more ranks than the smallest have more to send than its; all else is as even."""
    communication = Communication(kind, num_bytes, tuple(sorted(ranks)))
    for way, inside_s, between_s in busiest(communication, FABRICS["rail"]):
        if way.pattern not in (Pattern.TREE, Pattern.NVLS):
            assert max(inside_s, between_s) == pytest.approx(way.transfer_s(num_bytes), rel=1e-9), way


@given(
    num_nodes=st.integers(2, NUM_NODES), num_local=st.integers(2, NUM_LOCAL), num_bytes=BYTES, top_k=st.integers(1, 8)
)
def test_busiest_link_takes_the_transfer_time_of_expert_dispatch(
    num_nodes: int, num_local: int, num_bytes: int, top_k: int
) -> None:
    ranks, draw = group(num_nodes, num_local), ExpertDraw(num_nodes * num_local * 8, top_k)
    communication = Communication(CollectiveKind.ALL_TO_ALL, num_bytes, ranks, draw)
    for way, inside_s, between_s in busiest(communication, FABRICS["rail"]):
        assert way.pattern is Pattern.ONCE_PER_NODE
        assert max(inside_s, between_s) == pytest.approx(way.transfer_s(num_bytes), rel=1e-9), way


@pytest.mark.parametrize("kind", CollectiveKind)
@given(num_nodes=st.integers(1, 6), num_bytes=BYTES)
def test_no_link_takes_more_than_the_transfer_time_of_gloo(
    kind: CollectiveKind, num_nodes: int, num_bytes: int
) -> None:
    ranks = members_of(kind, group(num_nodes, NUM_LOCAL))
    [(way, inside_s, between_s)] = busiest(Communication(kind, num_bytes, ranks), HOSTS)
    transfer_s, most_s = way.transfer_s(num_bytes), max(inside_s, between_s)
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.RING, CollectiveKind.SEND) and num_nodes > 1:
        assert 0 < most_s <= transfer_s * (1 + 1e-9)  # rounds of a tree; hops that have the card for themselves
    elif kind is CollectiveKind.BROADCAST:
        assert most_s == pytest.approx(3 / 6 * transfer_s)  # the root sends in each of 3 rounds; 3 + 2 + 1 in sequence
    else:
        assert most_s == pytest.approx(transfer_s, rel=1e-9)


@cache
def cubes(closed: bool) -> ClusterSpec:
    """Two cubes of 64 chips whose axes close to rings, or do not."""
    return torus("ici-tpu-v4" if closed else "ici-tpu-v5e", (4, 4, 4) if closed else (4, 4), 2)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("kind", CollectiveKind)
@given(num_slices=st.integers(1, 2), num_bytes=BYTES)
def test_busiest_link_takes_the_transfer_time_of_a_torus(
    closed: bool, kind: CollectiveKind, num_slices: int, num_bytes: int
) -> None:
    cluster = cubes(closed)
    ranks = tuple(range(num_slices * cluster.devices_per_node))
    ranks = (ranks[0], ranks[-1]) if kind is CollectiveKind.SEND and num_slices > 1 else ranks
    ranks = ranks[:2] if kind is CollectiveKind.SEND else ranks
    [(way, inside_s, between_s)] = busiest(Communication(kind, num_bytes, ranks), cluster)
    times_s = [move.factor * num_bytes / move.bytes_per_s for move in way.moves]
    if way.pattern is Pattern.HOP:
        assert max(inside_s, between_s) >= times_s[0] * (1 - 1e-9)  # neighbors in rank order may be several hops apart
    elif kind is CollectiveKind.ALL_REDUCE and not closed:
        # on a line of 4, links carry 4 of 6 parts: those at the ends are idle at the end of one phase or the other
        assert inside_s == pytest.approx(4 / 6 * times_s[0])
    else:
        assert inside_s == pytest.approx(times_s[0], rel=1e-9)
    if way.pattern is not Pattern.HOP and num_slices > 1:
        assert between_s == pytest.approx(times_s[1], rel=1e-9)


def prescribed(
    name: str,
    communication: Communication,
    cluster: ClusterSpec,
    num_servers: int | None = None,
    server_shares: tuple[float, ...] = (),
) -> list[CommAlgorithm]:
    """A prescribed algorithm with all protocols."""
    collectives = Collectives.model_validate({communication.kind.value: name, "parameter_servers": num_servers})
    return prescribed_ways(name, collectives, communication, route_of(communication.ranks, cluster), server_shares)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("halving_doubling", "hierarchical") for kind in SHARDING),
        ("hierarchical", CollectiveKind.ALL_TO_ALL),
    ],
)
@given(nodes=st.sampled_from([2, 4]), local=st.sampled_from([2, 4, 8]), num_bytes=BYTES)
def test_busiest_links_take_the_time_of_each_phase(
    fabric: str, name: str, kind: CollectiveKind, nodes: int, local: int, num_bytes: int
) -> None:
    communication = Communication(kind, num_bytes, group(nodes, local))
    ways = prescribed(name, communication, FABRICS[fabric])
    for way, inside_s, between_s in busiest(communication, FABRICS[fabric], ways):
        times_s = [move.factor * num_bytes / move.bytes_per_s for move in way.moves]
        assert [inside_s, between_s] == pytest.approx(times_s, rel=1e-9), way


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("switch", [True, False])
@given(num_nodes=st.integers(2, NUM_NODES), num_local=st.integers(1, NUM_LOCAL), num_bytes=BYTES)
def test_busiest_link_takes_the_transfer_time_of_sharp(
    fabric: str, switch: bool, num_nodes: int, num_local: int, num_bytes: int
) -> None:
    links = {"inter_link": SHARP} if switch else {"inter_link": SHARP, "intra_link": NO_SWITCH}
    cluster = FABRICS[fabric].model_copy(update=links)
    communication = Communication(CollectiveKind.ALL_REDUCE, num_bytes, group(num_nodes, num_local))
    [(way, inside_s, between_s)] = busiest(communication, cluster, prescribed("sharp", communication, cluster))
    assert max(inside_s, between_s) == pytest.approx(way.transfer_s(num_bytes), rel=1e-9)


def test_uplink_of_switches_that_reduce_has_the_bytes_of_one_node() -> None:
    """SHARP sends one sum over the uplink of an oversubscribed leaf of 4 nodes; a ring over 8 nodes sends about two."""
    leaves = LeafSpine(kind="leaf_spine", nodes_per_leaf=4, oversubscription=4)
    cluster = NODES.model_copy(update={"topology": leaves, "inter_link": SHARP, "num_devices": 64})
    communication, fabric = Communication(CollectiveKind.ALL_REDUCE, 10**9, tuple(range(64))), fabric_of(cluster)
    [way] = prescribed("sharp", communication, cluster)
    uplink = fabric.link_named("leaf0 -> spine")
    loads = link_bytes(way, communication, cluster)
    assert loads[uplink] == pytest.approx(10**9)
    [ring] = [way for way in algorithms_of(communication, cluster) if way.name == "ring Simple"]
    assert link_bytes(ring, communication, cluster)[uplink] == pytest.approx(2 * 63 / 64 * 10**9)


@pytest.mark.parametrize("fabric", [*FABRICS, "gloo"])
@given(num_nodes=st.integers(1, NUM_NODES), num_local=st.integers(1, NUM_LOCAL), num_bytes=BYTES, data=st.data())
def test_busiest_links_take_the_time_of_each_phase_of_parameter_servers(
    fabric: str, num_nodes: int, num_local: int, num_bytes: int, data: st.DataObject
) -> None:
    """Of equal parts, and of whole parameters: the server with the most bytes counts. Ranks of gloo share one card."""
    ranks = group(num_nodes, NUM_LOCAL if fabric == "gloo" else num_local)
    if len(ranks) == 1:
        return
    weights = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=num_nodes).filter(any))
    shares = data.draw(st.sampled_from([(), tuple(weight / sum(weights) for weight in weights)]))
    cluster = HOSTS if fabric == "gloo" else FABRICS[fabric]
    communication = Communication(CollectiveKind.ALL_REDUCE, num_bytes, ranks)
    for way in prescribed("parameter_server", communication, cluster, len(weights), shares):
        links, phases = fabric_of(cluster), [defaultdict[int, float](float) for _ in way.moves]
        for source, destination, share, phase in flows_of(way, communication, ranks, cluster, links).each():
            for link in links.path(source, destination):
                edge = links.links[link]
                rate = edge.bytes_per_s * (way.inside if edge.is_inside_node else way.between)
                phases[phase][link] += share * num_bytes / rate
        times_s = [move.factor * num_bytes / move.bytes_per_s for move in way.moves]
        assert [max(phase.values()) for phase in phases] == pytest.approx(times_s, rel=1e-9), way


def test_devices_on_pcie_reduce_without_a_switch() -> None:
    """A topology may say so of a link that has a switch; the bytes of both halves then go directly."""
    pcie = NODES.model_copy(update={"topology": Switch(kind="switch", node=Pcie(kind="pcie"))})
    communication = Communication(CollectiveKind.ALL_REDUCE, 10**9, tuple(range(8)))
    [nvls] = [way for way in algorithms_of(communication, pcie) if way.pattern is Pattern.NVLS]
    fabric, loads = fabric_of(pcie), link_bytes(nvls, communication, pcie)
    assert loads[fabric.link_named("node0.gpu0 -> node0.host")] == pytest.approx(2 * 7 / 8 * 10**9)
