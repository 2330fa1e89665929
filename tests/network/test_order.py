"""Order of ranks: rings follow it, and permuting ranks is permuting cables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import Graph, LeafSpine
from simplan.cost.communication.collectives import algorithm_of
from simplan.explain.rank_order import faster_order
from simplan.model.layer import CollectiveKind
from simplan.network.build import fabric_of
from simplan.network.order import devices_by_network, nodes_by_network
from simplan.network.usage import Usages
from simplan.plan.collectives import Collectives
from simplan.plan.placement import PlacedAxis
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.program.program import Communication
from simplan.search import search
from simplan.search.space import SearchSpace
from tests.jobs import job_of
from tests.network.clusters import dgx_nodes

LEAVES = LeafSpine(kind="leaf_spine", nodes_per_leaf=2, oversubscription=16)
ORDERS = [*permutations(range(4))]


def cabled(leaf_of: Sequence[int]) -> Graph:
    """Two leaves below a spine, with each node on a given one."""
    links = [{"between": [f"node{node}", f"leaf{leaf}"], "gbit": 3200.0} for node, leaf in enumerate(leaf_of)]
    links += [{"between": [f"leaf{leaf}", "spine"], "gbit": 400.0} for leaf in (0, 1)]
    return Graph.model_validate({"kind": "graph", "links": links}, strict=False)


def placed(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(8 * node + local for node in order for local in range(8))


def uplink_bytes(cluster: ClusterSpec, devices: tuple[int, ...], kind: CollectiveKind, algorithm: str) -> float:
    """Bytes from the first leaf to the spine."""
    communication = Communication(kind, 1, tuple(range(len(devices))))
    collectives = Collectives.model_validate({kind.value: algorithm})
    way, fabric = algorithm_of(communication, cluster, None, collectives), fabric_of(cluster)
    [usage] = Usages(cluster, fabric).of(communication, way, devices)
    names = [fabric.links[link].name for link in usage.links.tolist()]
    return float(usage.num_bytes[names.index("leaf0 -> spine")])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_ring_leaves_its_leaf_as_often_as_ranks_do(order: tuple[int, ...]) -> None:
    """A walk along the ranks: each hop between nodes has 31/32 of the buffer, over all network cards."""
    hops = Counter((order[at] // 2, order[(at + 1) % 4] // 2) for at in range(4))
    expected = Fraction(31, 32) * hops[0, 1]
    crossing = uplink_bytes(dgx_nodes(LEAVES), placed(order), CollectiveKind.ALL_GATHER, "ring")
    assert crossing == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_ranks_in_another_order_are_cables_in_another_order(order: tuple[int, ...], algorithm: str) -> None:
    by_rank = uplink_bytes(dgx_nodes(LEAVES), placed(order), CollectiveKind.ALL_REDUCE, algorithm)
    by_cable = uplink_bytes(
        dgx_nodes(cabled([node // 2 for node in order])), placed(range(4)), CollectiveKind.ALL_REDUCE, algorithm
    )
    assert by_rank == pytest.approx(by_cable, rel=1e-12)


def test_a_broadcast_keeps_the_order_of_ranks_from_its_root_on() -> None:
    """The root lists itself first; the ring goes on with the rank after it, and not with the lowest one."""
    cluster = dgx_nodes(LEAVES)
    fabric, ranks = fabric_of(cluster), (16, *(rank for rank in range(32) if rank != 16))
    communication = Communication(CollectiveKind.BROADCAST, 1, ranks)
    way = algorithm_of(communication, cluster)
    loads = []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        devices = tuple(placed(order)[rank] for rank in ranks)
        [usage] = Usages(cluster, fabric).of(communication, way, devices)
        names = [fabric.links[link].name for link in usage.links.tolist()]
        loads.append(float(usage.num_bytes[[name.endswith("-> spine") for name in names]].sum()))
    # on the way 2 -> 3 -> 0 -> 1, or on devices 1 -> 3 -> 0 -> 2; and back to the node of the root in 7 of 8 rings
    assert loads == pytest.approx([1.0 + 7 / 8, 3.0 + 7 / 8])


@given(st.permutations(range(8)))
@settings(max_examples=25, deadline=None)
def test_order_of_the_network_has_the_nodes_of_a_leaf_together(leaves: list[int]) -> None:
    graph = cabled([leaf // 4 for leaf in leaves])
    order = nodes_by_network(dgx_nodes(graph, 8))
    assert sorted(order) == list(range(8))
    crossings = sum(leaves[a] // 4 != leaves[b] // 4 for a, b in zip(order, (*order[1:], order[0]), strict=True))
    assert crossings == 2
    assert nodes_by_network(dgx_nodes(LEAVES, 8)) == tuple(range(8))


def test_prediction_search_and_warning_see_the_order() -> None:
    """The same network cabled in another way, and ranks that follow the cables."""
    straight, mixed = (dgx_nodes(cabled(leaves)) for leaves in ((0, 0, 1, 1), (0, 1, 0, 1)))
    model = catalog.model("llama3-8b").with_changes(seq_len=512)
    job = job_of(model, {"dp_shard": 32, "recompute": "full"}, global_batch_size=32, precision="bf16")
    best, bad = (predict(replace(job, cluster=cluster)) for cluster in (straight, mixed))
    assert bad.step_time_s > 1.5 * best.step_time_s
    assert faster_order(best) is None
    better = faster_order(bad)
    assert better is not None
    assert better.nodes == (0, 2, 1, 3)
    assert better.hostfile == ("node0 slots=8", "node2 slots=8", "node1 slots=8", "node3 slots=8")
    assert better.step_time_s == pytest.approx(best.step_time_s, rel=1e-9)
    shuffled = job.with_plan(ParallelPlan(dp_shard=32, recompute="full", placement=placed((0, 2, 1, 3))))
    assert predict(replace(shuffled, cluster=dgx_nodes(LEAVES))).step_time_s == pytest.approx(bad.step_time_s)
    orders: tuple[tuple[PlacedAxis, ...] | tuple[int, ...], ...] = (("tp", "dp", "pp"), devices_by_network(mixed))
    space = SearchSpace(
        tp=(1,), pp=(1,), dp_replicate=(1,), zero_stage=(3,), microbatch_size=(1,), recompute=("full",),
        reshard_after_forward=(True,), placement=orders, top=2,
    )  # fmt: skip
    ranked = search(replace(job, cluster=mixed), space).ranked
    assert [plan.plan.placement for plan in ranked] == [orders[1], None]
    assert [plan.step_time_s for plan in ranked] == pytest.approx([best.step_time_s, bad.step_time_s], rel=1e-9)
