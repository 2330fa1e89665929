"""ECMP: connections fall on uplinks like balls into bins, and parallel cables are links of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from simplan.cluster.topology import Graph, LeafSpine, topology_problems
from simplan.cost.communication.collectives import algorithm_of
from simplan.model.layer import CollectiveKind
from simplan.network.build import fabric_of
from simplan.network.usage import Usages
from simplan.plan.collectives import Collectives
from simplan.predict import predict
from simplan.program.program import Communication
from simplan.report.text import prediction_text
from simplan.search import search
from simplan.search.space import SearchSpace
from tests.jobs import job_of
from tests.network.clusters import dgx_nodes
from tests.support.problems import is_of
from tests.support.slow import slow_except

SEEDS = 40


def busiest_uplink(num_nodes: int, nodes_per_leaf: int, spines: int, connections: int, seed: int) -> float:
    """Time of the busiest link between switches over the time of the collective alone: a ring over all nodes."""
    topology = LeafSpine(
        kind="leaf_spine",
        nodes_per_leaf=nodes_per_leaf,
        spines=spines,
        routing="ecmp",
        connections=connections,
        seed=seed,
    )
    cluster = dgx_nodes(topology, num_nodes)
    fabric, communication = (
        fabric_of(cluster),
        Communication(CollectiveKind.ALL_REDUCE, 2**30, tuple(range(8 * num_nodes))),
    )
    way = algorithm_of(communication, cluster, None, Collectives.model_validate({"all_reduce": "ring"}))
    [usage] = Usages(cluster, fabric).of(communication, way)
    between = [
        seconds
        for link, seconds in zip(usage.links.tolist(), usage.seconds.tolist(), strict=True)
        if "spine" in fabric.links[link].name
    ]
    return float(max(between)) / usage.transfer_s


def balls_in_bins(num_nodes: int, nodes_per_leaf: int, spines: int, connections: int) -> float:
    """Mean of the fullest uplink, over the mean one if all nodes sent to the spines."""
    random, fullest = np.random.default_rng(0), []
    for _ in range(400):
        up, down = np.zeros((2, num_nodes // nodes_per_leaf, spines))
        for node in range(num_nodes):
            leaf, to = node // nodes_per_leaf, (node + 1) % num_nodes // nodes_per_leaf
            for spine in random.integers(0, spines, 8 * connections if leaf != to else 0):
                up[leaf, spine] += 1 / connections
                down[to, spine] += 1 / connections
        fullest.append(max(up.max(), down.max()) * spines / (8 * nodes_per_leaf))
    return float(np.mean(fullest))


@pytest.mark.parametrize("connections", slow_except([4], [1, 4, 16]))
@pytest.mark.parametrize(("num_nodes", "nodes_per_leaf", "spines"), [(16, 1, 8), (32, 4, 32)])
def test_the_fullest_uplink_is_that_of_balls_in_bins(
    num_nodes: int, nodes_per_leaf: int, spines: int, connections: int
) -> None:
    fullest = [busiest_uplink(num_nodes, nodes_per_leaf, spines, connections, seed) for seed in range(SEEDS)]
    expected = balls_in_bins(num_nodes, nodes_per_leaf, spines, connections)
    assert np.mean(fullest) == pytest.approx(expected, rel=0.1)
    assert len(set(fullest)) > 1


def test_connections_by_default_are_the_channels_of_nccl() -> None:
    topology = LeafSpine(kind="leaf_spine", nodes_per_leaf=1, spines=8, routing="ecmp")
    assert fabric_of(dgx_nodes(topology, 4)).num_connections == 2
    assert fabric_of(dgx_nodes(topology.with_changes(routing="adaptive", spines=None), 4)).num_connections == 1


def star(*cables: tuple[str, str, float], **fields: Any) -> Graph:
    links = [{"between": [first, second], "gbit": gbit} for first, second, gbit in cables]
    return Graph.model_validate({"kind": "graph", "links": links, **fields}, strict=False)


def test_parallel_cables_are_links_of_their_own() -> None:
    cables = (("node0", "s0", 1600.0), ("node0", "s0", 800.0), ("node1", "s0", 3200.0))
    hashed, divided = (fabric_of(dgx_nodes(star(*cables, routing=routing), 2)) for routing in ("ecmp", "adaptive"))
    first, second = (hashed.link_named(name) for name in ("node0 -> s0", "node0 -> s0 #2"))
    assert [hashed.links[link].bytes_per_s for link in (first, second)] == [2e11, 1e11]
    shares = {path[1]: share for path, share in divided.routes(0, 8)}
    assert shares == {first: pytest.approx(2 / 3), second: pytest.approx(1 / 3)}  # by bandwidth
    taken = {path[1] for device in range(8) for path, _ in hashed.routes(device, 8 + device)}
    assert taken == {first, second}
    many = fabric_of(dgx_nodes(star(*cables, connections=1000), 2))
    assert {path[1]: share for path, share in many.routes(0, 8)} == {
        first: pytest.approx(0.5, abs=0.1),
        second: pytest.approx(0.5, abs=0.1),
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"routing": "ecmp", "spines": 4, "connections": 0},
            "connections\n  Input should be greater than or equal to 1",
        ),
        ({"routing": "ecmp", "spines": 4, "seed": 1.5}, "seed\n  Input should be a valid integer"),
        ({"routing": "ecmp", "spines": 4, "num_seeds": 0}, "num_seeds\n  Input should be greater than or equal to 1"),
    ],
)
def test_connections_and_seeds_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LeafSpine.model_validate({"kind": "leaf_spine", "nodes_per_leaf": 1, **fields})


def test_a_hash_setting_without_a_hash_is_refused() -> None:
    topology = LeafSpine(kind="leaf_spine", nodes_per_leaf=2, connections=4)
    [problem] = topology_problems(dgx_nodes(topology, 4))
    assert is_of(problem, "cluster.topology.connections", "4", rule="adaptive routing has none", fix="routing: ecmp")


def test_a_prediction_says_the_range_over_seeds_and_a_search_does_not() -> None:
    topology = LeafSpine(kind="leaf_spine", nodes_per_leaf=1, spines=8, routing="ecmp", connections=1, num_seeds=3)
    job = replace(job_of("gpt2-1.5b", {"dp_shard": 32}, global_batch_size=32), cluster=dgx_nodes(topology, 4))
    single = [
        replace(job, cluster=dgx_nodes(topology.model_copy(update={"seed": seed, "num_seeds": 1}), 4))
        for seed in range(3)
    ]
    steps_s = [predict(job_of_seed).step_time_s for job_of_seed in single]
    prediction = predict(job)
    assert prediction.hashing is not None
    assert prediction.step_time_s == steps_s[0]
    assert prediction.hashing.range_s == (min(steps_s), max(steps_s))
    assert prediction.hashing.mean_s == pytest.approx(np.mean(steps_s))
    assert "  ECMP         " in prediction_text(prediction)
    assert prediction.to_json(timeline=False)["hashing"]["num_seeds"] == 3
    assert predict(single[0]).hashing is None
    space = SearchSpace(tp=(1,), pp=(1,), dp_replicate=(1,), zero_stage=(3,), recompute=("none",), top=1)
    both = [search(job_of_seed, space).ranked for job_of_seed in (job, single[0])]
    assert [(plan.plan, plan.step_time_s) for plan in both[0]] == [(plan.plan, plan.step_time_s) for plan in both[1]]
