"""Fabrics against closed forms of the literature, and their routes against the graph of links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import TOPOLOGIES, FatTree
from simplan.network.build import fabric_of
from simplan.network.fabric import Fabric
from simplan.problems import parse_model
from tests.support.problems import refuses

GBIT = 1e9 / 8


def cluster_with(topology: dict[str, Any], nodes: int, per_node: int = 2, nics: int | None = None) -> ClusterSpec:
    """Nodes of ``per_node`` devices, each with 100 Gbit/s of network."""
    entry = catalog.node("dgx-a100-40gb")
    cluster = ClusterSpec(
        id="inline",
        device=entry.device,
        devices_per_node=per_node,
        num_devices=nodes * per_node,
        intra_link=catalog.link("nvlink3") if per_node > 1 else None,
        inter_link=catalog.network_link(100) if nodes > 1 else None,
        nics_per_node=nics,
    )
    return cluster.model_copy(update={"topology": parse_model(TOPOLOGIES[topology["kind"]], topology)})


def torus(shape: list[int], link: str = "ici-tpu-v4", slices: int = 1) -> ClusterSpec:
    size = 1
    for axis in shape:
        size *= axis
    cluster = ClusterSpec(
        id="inline",
        device=catalog.device("tpu-v4"),
        devices_per_node=size,
        num_devices=size * slices,
        intra_link=catalog.link(link),
        inter_link=catalog.network_link(50) if slices > 1 else None,
    )
    return cluster.model_copy(update={"topology": parse_model(TOPOLOGIES["torus"], {"kind": "torus", "shape": shape})})


def names(fabric: Fabric, source: int, destination: int) -> list[str]:
    return [fabric.links[link].name for link in fabric.path(source, destination)]


def check_path(fabric: Fabric, source: int, destination: int) -> None:
    """A path is a walk along the links from its source to its destination without a link twice."""
    place, path = source, fabric.path(source, destination)
    cards = fabric.card_of_device
    for index in path:
        link = fabric.links[index]
        if link.source != place:  # a device, or its host, and its network card are one place
            nodes = {fabric.vertices[vertex].partition(".")[0] for vertex in (link.source, place)}
            assert len(nodes) == 1
            assert {link.source, place} & set(cards.tolist())
        place = link.destination
    assert place in (destination, *(cards[destination : destination + 1] if destination < fabric.num_devices else ()))
    assert len(set(path)) == len(path)
    assert path == fabric.path(source, destination)


def cut_bytes_per_s(fabric: Fabric, half: set[int]) -> float:
    """Bandwidth of the links used by all flows from devices of a half to the other devices that leave the half's links.

    The maximum flow from half to half, by augmenting paths over the directed graph (Edmonds, Karp 1972).
    """
    capacity: dict[tuple[int, int], float] = defaultdict(float)
    for link in fabric.links:
        capacity[link.source, link.destination] += link.bytes_per_s
    for device, card in enumerate(fabric.card_of_device.tolist()):  # the device is its card's only user, or shares it
        capacity[device, card] = capacity[card, device] = 1e18
    start, end = -1, -2
    for device in range(fabric.num_devices):
        capacity[(start, device) if device in half else (device, end)] = 1e18
    neighbors: dict[int, set[int]] = defaultdict(set)
    for source, destination in list(capacity):
        neighbors[source].add(destination)
        neighbors[destination].add(source)
    total = 0.0
    while True:
        before, border = {start: start}, [start]
        while border and end not in before:
            reached = []
            for vertex in border:
                for other in neighbors[vertex]:
                    if other not in before and capacity[vertex, other] > 1:
                        before[other] = vertex
                        reached.append(other)
            border = reached
        if end not in before:
            return total
        steps, vertex = [], end
        while vertex != start:
            steps.append((before[vertex], vertex))
            vertex = before[vertex]
        amount = min(capacity[step] for step in steps)
        for source, destination in steps:
            capacity[source, destination] -= amount
            capacity[destination, source] += amount
        total += amount


@pytest.mark.parametrize(("radix", "levels", "cards"), [(4, 3, 16), (8, 3, 128), (64, 3, 65_536), (36, 2, 648)])
def test_fat_tree_holds_the_published_number_of_cards(radix: int, levels: int, cards: int) -> None:
    """k^3/4 hosts (Al-Fares et al. 2008); k^2/2 with two levels, 648 with the 36 ports of QDR InfiniBand switches."""
    assert FatTree(kind="fat_tree", radix=radix, levels=levels).capacity == cards


@pytest.mark.parametrize("how", ["adaptive", "ecmp"])
def test_full_fat_tree_has_full_bisection(how: str) -> None:
    fabric = fabric_of(cluster_with({"kind": "fat_tree", "radix": 4, "routing": how}, nodes=16, per_node=1))
    half = set(range(8))
    assert cut_bytes_per_s(fabric, half) == pytest.approx(8 * 100 * GBIT)
    mixed = {0, 3, 5, 6, 9, 10, 12, 15}
    assert cut_bytes_per_s(fabric, mixed) == pytest.approx(8 * 100 * GBIT)
    lengths = [len(fabric.path(0, device)) for device in range(16)]
    assert lengths == [0, 2, 4, 4, *[6] * 12], "same leaf, same pod, other pods"


@pytest.mark.parametrize("how", [{}, {"routing": "ecmp", "spines": 4}])
@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ({"kind": "leaf_spine", "nodes_per_leaf": 4, "oversubscription": 4}, 100),
        ({"kind": "leaf_spine", "nodes_per_leaf": 4}, 400),
        ({"kind": "rail", "nodes_per_group": 4, "oversubscription": 2}, 400),
    ],
)
def test_bisection_is_that_of_the_uplinks(topology: dict[str, Any], how: dict[str, Any], expected: float) -> None:
    """8 nodes are cut in half: one leaf of four nodes with one 100 Gbit/s card each, or two rail switches per half."""
    per_node = 2 if topology["kind"] == "rail" else 1
    fabric = fabric_of(cluster_with(topology | how, nodes=8, per_node=per_node))
    half = set(range(4 * per_node))
    assert cut_bytes_per_s(fabric, half) == pytest.approx(expected * GBIT)


def test_pods_are_oversubscribed_as_in_llama_3() -> None:
    """A pod of 3072 GPUs has 1/7 of its bandwidth to other pods, and all of it inside."""
    topology = {"kind": "leaf_spine", "nodes_per_leaf": 2, "leaves_per_pod": 192, "pod_oversubscription": 7}
    fabric = fabric_of(cluster_with(topology, nodes=2 * 384, per_node=8))
    index = {name: place for place, name in enumerate(fabric.vertices)}
    [up] = fabric.path(index["pod0.spine"], index["core"])
    assert fabric.links[up].bytes_per_s == pytest.approx(3072 * 100 * GBIT / 7)
    [leaf] = fabric.path(index["leaf0"], index["pod0.spine"])
    assert fabric.links[leaf].bytes_per_s == pytest.approx(16 * 100 * GBIT)
    assert len(fabric.path(0, 3072)) == 6
    assert [name for name, _ in fabric.levels] == ["node", "leaf", "pod"]


def test_cards_of_one_rail_meet_at_their_leaf() -> None:
    fabric = fabric_of(cluster_with({"kind": "rail", "nodes_per_group": 4}, nodes=8, per_node=4))
    assert names(fabric, 1, 5) == ["node0.nic1 -> group0.rail1", "group0.rail1 -> node1.nic1"]
    assert len(fabric.path(1, 6)) == 4, "another rail: over the spines"
    assert len(fabric.path(1, 17)) == 4, "the same rail of another group"
    leaf = fabric.switch_of([1, 5, 9], inside_node=False)
    assert leaf is not None
    assert fabric.vertices[leaf] == "group0.rail1"
    spine = fabric.switch_of([1, 17], inside_node=False)
    assert spine is not None
    assert fabric.vertices[spine] == "spine"
    assert names(fabric, 17, spine) == ["node4.nic1 -> group1.rail1", "group1.rail1 -> spine"]


def test_devices_share_the_cards_that_they_have() -> None:
    fabric = fabric_of(cluster_with({"kind": "switch"}, nodes=2, per_node=4, nics=1))
    assert {names(fabric, device, 4)[0] for device in range(4)} == {"node0.nic0 -> switch"}
    assert fabric.links[fabric.path(0, 4)[0]].bytes_per_s == pytest.approx(400 * GBIT), "four devices of 100 Gbit/s"
    of_two = fabric_of(cluster_with({"kind": "switch"}, nodes=2, per_node=4, nics=2))
    firsts = [names(of_two, device, 4)[0].partition(" ")[0] for device in range(4)]
    assert firsts == ["node0.nic0", "node0.nic0", "node0.nic1", "node0.nic1"]


def steps_around(length: int, *, closes: bool) -> Iterator[int]:
    for start, end in product(range(length), repeat=2):
        yield min(abs(end - start), length - abs(end - start)) if closes else abs(end - start)


@pytest.mark.parametrize(
    ("shape", "link", "closes"),
    [
        ([4, 4, 4], "ici-tpu-v4", True),
        ([4, 8], "ici-tpu-v4", True),
        ([4, 8], "ici-tpu-v5e", False),
        ([2, 2, 3], "ici-tpu-v4", False),
    ],
)
def test_hops_on_a_torus(shape: list[int], link: str, *, closes: bool) -> None:
    """Sum over all pairs of the distances along each axis; axes of a v5e close from 16 chips on, of a v4 from 4."""
    fabric = fabric_of(torus(shape, link))
    size = fabric.num_devices
    total = sum(len(fabric.path(source, end)) for source, end in product(range(size), repeat=2))
    expected = sum((size // length) ** 2 * sum(steps_around(length, closes=closes)) for length in shape)
    assert total == expected
    degree = sum(2 if closes else 2 * (length - 1) / length for length in shape)
    assert len(fabric.links) == round(size * degree)
    for source, end in combinations(range(size), 2):
        check_path(fabric, source, end)


def test_torus_has_the_bisection_of_its_longest_axis_cut_twice() -> None:
    fabric = fabric_of(torus([4, 8]))
    half = {device for device in range(32) if device % 8 < 4}
    assert cut_bytes_per_s(fabric, half) == pytest.approx(2 * 4 * catalog.link("ici-tpu-v4").bytes_per_s)


def test_slices_are_joined_by_their_network_cards() -> None:
    fabric = fabric_of(torus([2, 4], slices=2))
    assert names(fabric, 3, 8) == ["node0.nic3 -> switch", "switch -> node1.nic0"]
    assert fabric.switch_of([0, 1], inside_node=True) is None


def test_dragonfly_takes_at_most_three_links_between_routers() -> None:
    """Kim et al. 2008: minimal routes are local, global, local; nine groups of 4 routers have one link per pair."""
    topology = {
        "kind": "dragonfly",
        "nodes_per_router": 2,
        "routers_per_group": 4,
        "global_gbit": 400,
        "local_gbit": 200,
    }
    fabric = fabric_of(cluster_with(topology, nodes=72, per_node=1))
    lengths = {len(fabric.path(0, device)) - 2 for device in range(1, 72)}
    assert lengths == {0, 1, 2, 3}
    between = [
        link
        for link in fabric.links
        if "router" in link.name.split(" -> ")[0] and "router" in link.name.split(" -> ")[1]
    ]
    assert len(between) == 9 * 4 * 3 + 9 * 8
    outgoing: dict[int, int] = defaultdict(int)
    for link in between:
        if link.bytes_per_s == pytest.approx(400 * GBIT):
            outgoing[link.source] += 1
    assert set(outgoing.values()) == {2}, "each of 4 routers has 2 of the 8 links to other groups"


def test_sites_are_joined_by_one_slow_link_each() -> None:
    topology = {
        "kind": "sites", "nodes_per_site": 4, "gbit_per_site": 10, "latency_s": 0.02,
        "inside": {"kind": "leaf_spine", "nodes_per_leaf": 2, "routing": "ecmp", "spines": 2},
    }  # fmt: skip
    fabric = fabric_of(cluster_with(topology, nodes=8, per_node=2))
    path = [fabric.links[link] for link in fabric.path(0, 8)]
    assert sum(link.latency_s for link in path) == pytest.approx(0.02)
    assert min(link.bytes_per_s for link in path) == pytest.approx(10 * GBIT)
    assert cut_bytes_per_s(fabric, set(range(8))) == pytest.approx(10 * GBIT)
    assert sum(link.latency_s for link in map(fabric.links.__getitem__, fabric.path(0, 6))) == 0


def test_pcie_without_peer_to_peer_goes_through_the_host() -> None:
    node = {"kind": "pcie", "devices_per_switch": 2}
    with_peers = fabric_of(cluster_with({"kind": "switch", "node": node}, nodes=1, per_node=4))
    assert names(with_peers, 0, 1) == ["node0.gpu0 -> node0.pcie0", "node0.pcie0 -> node0.gpu1"]
    without = fabric_of(cluster_with({"kind": "switch", "node": node | {"peer_to_peer": False}}, nodes=2, per_node=4))
    up, down = (
        ["node0.gpu0 -> node0.pcie0", "node0.pcie0 -> node0.host"],
        ["node0.host -> node0.pcie0", "node0.pcie0 -> node0.gpu1"],
    )
    assert names(without, 0, 1) == [*up, *down]
    assert names(without, 0, 4)[:3] == [*up, "node0.nic0 -> switch"]
    assert cut_bytes_per_s(with_peers, {0, 1}) == pytest.approx(catalog.link("nvlink3").bytes_per_s), "one uplink"


def test_graph_takes_the_fewest_links_and_hashes_over_equal_paths() -> None:
    ring = [{"between": [f"s{place}", f"s{(place + 1) % 4}"], "gbit": 100} for place in range(4)]
    hosts = [{"between": [f"node{node}", f"s{node // 8}"], "gbit": 100} for node in range(32)]
    fabric = fabric_of(cluster_with({"kind": "graph", "links": [*ring, *hosts]}, nodes=32, per_node=1))
    assert names(fabric, 0, 8)[2:-2] == ["s0 -> s1"]
    opposite = {tuple(names(fabric, source, end)[2:-2]) for source in range(8) for end in range(16, 24)}
    assert opposite == {("s0 -> s1", "s1 -> s2"), ("s0 -> s3", "s3 -> s2")}


def test_hash_spreads_flows_over_the_spines() -> None:
    """64 x 64 flows over 16 spines: each has 256 in the mean, and within five standard deviations (15.5 each)."""
    topology = {"kind": "leaf_spine", "nodes_per_leaf": 64, "routing": "ecmp", "spines": 16}
    fabric = fabric_of(cluster_with(topology, nodes=128, per_node=1))
    flows: dict[str, int] = defaultdict(int)
    for source, end in product(range(64), range(64, 128)):
        flows[names(fabric, source, end)[1]] += 1
    assert len(flows) == 16
    assert all(abs(number - 256) < 78 for number in flows.values()), flows


TREES = st.one_of(
    st.fixed_dictionaries({"kind": st.just("switch")}),
    st.fixed_dictionaries(
        {
            "kind": st.just("leaf_spine"),
            "nodes_per_leaf": st.integers(1, 4),
            "oversubscription": st.floats(1, 8),
            "leaves_per_pod": st.none() | st.integers(1, 3),
            "spines": st.integers(2, 3),
            "routing": st.sampled_from(["adaptive", "ecmp"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("rail"),
            "nodes_per_group": st.integers(1, 4),
            "spines": st.integers(2, 3),
            "routing": st.sampled_from(["adaptive", "ecmp"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("fat_tree"),
            "radix": st.sampled_from([8, 10]),
            "levels": st.sampled_from([2, 3]),
            "routing": st.sampled_from(["adaptive", "ecmp"]),
        }
    ),
)
KINDS = st.one_of(
    TREES,
    st.fixed_dictionaries(
        {
            "kind": st.just("dragonfly"),
            "nodes_per_router": st.integers(1, 2),
            "routers_per_group": st.integers(1, 4),
            "global_gbit": st.floats(1, 1000),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("sites"),
            "nodes_per_site": st.integers(1, 5),
            "gbit_per_site": st.floats(1, 1000),
            "latency_s": st.floats(0, 1),
            "inside": st.none() | TREES,
        }
    ),
)
PCIE = st.none() | st.fixed_dictionaries(
    {"kind": st.just("pcie"), "devices_per_switch": st.none() | st.integers(1, 3), "peer_to_peer": st.booleans()}
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(KINDS, PCIE, st.integers(1, 9), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_every_pair_is_joined_there_and_back(
    topology: dict[str, Any], node: dict[str, Any] | None, nodes: int, per_node: int, nics: int | None
) -> None:
    """Paths are walks; the way back is as long; those to a common switch are beginnings of a way up."""
    fabric = fabric_of(cluster_with(topology | ({"node": node} if per_node > 1 else {}), nodes, per_node, nics))
    assert all(link.bytes_per_s > 0 for link in fabric.links)
    assert len({link.name for link in fabric.links}) == len(fabric.links), "names are unique"
    for source, end in combinations(range(fabric.num_devices), 2):
        check_path(fabric, source, end)
        check_path(fabric, end, source)
        assert len(fabric.path(source, end)) == len(fabric.path(end, source))
        if fabric.node_of_device[source] != fabric.node_of_device[end]:
            switch = fabric.switch_of([source, end], inside_node=False)
            if switch is not None:
                check_path(fabric, source, switch)
                check_path(fabric, switch, end)
                assert len(fabric.path(source, switch)) + len(fabric.path(switch, end)) == len(fabric.path(source, end))
    for _, domain in fabric.levels:
        assert domain.shape == (fabric.num_devices,)


def test_fabric_without_topology_is_one_switch() -> None:
    cluster = catalog.cluster("dgx-h100", 16)
    assert names(fabric_of(cluster), 0, 9) == ["node0.nic0 -> switch", "switch -> node1.nic1"]


def test_large_fabrics_are_linear_in_devices() -> None:
    topology = {"kind": "fat_tree", "radix": 64, "routing": "ecmp"}
    fabric = fabric_of(cluster_with(topology, nodes=2048, per_node=8))
    assert len(fabric.links) == 8 * 16_384, "up and down: NVLink, card, leaf to pod, pod to core"
    assert len(fabric.path(0, 16_383)) == 6


@pytest.mark.parametrize(
    ("topology", "nodes", "nics", "expected"),
    [
        ({"kind": "switch"}, 4, None, True),
        ({"kind": "leaf_spine", "nodes_per_leaf": 2, "leaves_per_pod": 2}, 8, None, True),
        ({"kind": "leaf_spine", "nodes_per_leaf": 3}, 8, None, False),
        ({"kind": "leaf_spine", "nodes_per_leaf": 2, "spines": 2, "routing": "ecmp"}, 8, None, False),
        ({"kind": "rail", "nodes_per_group": 4}, 8, None, True),
        ({"kind": "rail", "nodes_per_group": 4}, 8, 3, False),
        ({"kind": "fat_tree", "radix": 16}, 8, None, True),
        ({"kind": "fat_tree", "radix": 12}, 6, None, False),
        ({"kind": "dragonfly", "nodes_per_router": 2, "routers_per_group": 2, "global_gbit": 1}, 8, None, False),
        ({"kind": "sites", "nodes_per_site": 2, "gbit_per_site": 1, "latency_s": 0.0}, 4, None, True),
        ({"kind": "sites", "nodes_per_site": 3, "gbit_per_site": 1, "latency_s": 0.0}, 4, None, False),
    ],
)
def test_trees_of_equal_groups_are_symmetric(
    topology: dict[str, Any], nodes: int, nics: int | None, *, expected: bool
) -> None:
    """Cards of a fat tree with 12 ports straddle leaves: six per leaf, four per node."""
    assert fabric_of(cluster_with(topology, nodes, per_node=4, nics=nics)).is_symmetric is expected


def test_unknown_link_names_the_nearest() -> None:
    fabric = fabric_of(cluster_with({"kind": "leaf_spine", "nodes_per_leaf": 2}, nodes=4, per_node=1))
    assert fabric.links[fabric.link_named("leaf0 -> spine")].name == "leaf0 -> spine"
    with refuses("link", rule="is no link of the fabric", fix="did you mean leaf0 ->"):
        fabric.link_named("leaf0 -> spin")
