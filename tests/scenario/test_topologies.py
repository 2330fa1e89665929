"""``cluster.topology`` of scenario files: names, overrides, and a sentence for whatever cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import TOPOLOGIES, LeafSpine, Rail, Sites, Torus
from simplan.errors import SpecError
from simplan.network.build import fabric_of
from simplan.report.text import links_words
from simplan.rules import violations
from simplan.scenario import load_scenario, load_search
from tests.jobs import job_of
from tests.support.problems import is_of, refuses, says
from tests.support.slow import examples

HOW = """
model: {preset: gpt2-124m}
training: {global_batch_size: 64}
plan: {dp_replicate: 64}
"""
NODES = {"preset": "dgx-h100", "num_nodes": 8}


def cluster_of(folder: Path, topology: Any, **cluster: Any) -> ClusterSpec:
    file = folder / "case.yaml"
    file.write_text(HOW + json.dumps({"cluster": {**(cluster or NODES), "topology": topology}})[1:-1])
    return load_scenario(file).job.cluster


def refusal(folder: Path, topology: Any, **cluster: Any) -> str:
    with pytest.raises(SpecError) as caught:
        cluster_of(folder, topology, **cluster)
    return "\n".join(problem.sentence() for problem in caught.value.problems)


def test_a_name_or_a_mapping_is_read(tmp_path: Path) -> None:
    assert cluster_of(tmp_path, "superpod-h100").topology == Rail(kind="rail", nodes_per_group=32)
    topology = {"kind": "leaf_spine", "nodes_per_leaf": 4, "oversubscription": 4}
    assert cluster_of(tmp_path, topology).topology == LeafSpine(
        kind="leaf_spine", nodes_per_leaf=4, oversubscription=4.0
    )
    changed = cluster_of(tmp_path, {"preset": "superpod-h100", "oversubscription": 2.5})
    assert changed.topology == Rail(kind="rail", nodes_per_group=32, oversubscription=2.5)
    sites = {"kind": "sites", "nodes_per_site": 4, "gbit_per_site": 100, "latency_s": 0.01, "inside": "superpod-h100"}
    inside = cluster_of(tmp_path, sites).topology
    assert isinstance(inside, Sites)
    assert inside.inside == Rail(kind="rail", nodes_per_group=32)
    assert cluster_of(tmp_path, None).topology is None


def test_links_of_an_answer_name_the_topology(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, "superpod-h100")
    assert links_words(cluster.links).endswith("50 GB/s each; rail-optimized, 32 nodes per group, 1:1")
    assert "topology" not in catalog.cluster("dgx-h100", 64).links


def test_several_machines_like_this_one_have_a_topology(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    machines = "cluster: {preset: this-machine, num_nodes: 2, num_devices: 2, nic_gbit: 10, topology: one-switch}"
    file.write_text(HOW.replace("64}\n", "2}\n").replace("batch_size: 64", "batch_size: 2") + machines)
    fabric = fabric_of(load_scenario(file).job.cluster)
    assert [fabric.links[link].name for link in fabric.path(0, 1)] == ["node0.nic0 -> switch", "switch -> node1.nic0"]


TWO_RACKS = [{"between": [f"node{node}", f"tor{node // 4}"], "gbit": 100} for node in range(8)]
TORUS = {"device": "tpu-v4", "devices_per_node": 64, "num_nodes": 1}


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [
        ("superpod-h10", "cluster.topology = superpod-h10: is not ... catalog; did you mean superpod-h100?"),
        (7, "cluster.topology = 7: must be a name; write one word"),
        ({"nodes_per_leaf": 4}, "cluster.topology.kind: is missing; ... leaf_spine"),
        ({"kind": "ral"}, 'cluster.topology.kind = "ral": ... known choice; did you mean rail?'),
        ({"kind": ["rail"]}, 'cluster.topology.kind = ["rail"]: ... known choice'),
        ({"preset": "superpod-h100", "kind": "rail"}, "cluster.topology.kind: cannot go with preset"),
        ({"kind": "rail", "nodes_per_group": 4, "oversubscription": 0.5}, "oversubscription = 0.5: must be at least 1"),
        ({"kind": "rail", "nodes_per_group": 0}, "cluster.topology.nodes_per_group = 0: must be at least 1"),
        ({"kind": "rail", "nodes_per_group": 4, "rails": 9}, "rails = 9: is more than the 8 network cards of a node"),
        ({"kind": "rail", "nodes_per_leaf": 4}, "cluster.topology.nodes_per_leaf: is not a known key; "),
        ({"kind": "leaf_spine", "nodes_per_leaf": 4, "routing": "ecmp"}, 'routing = "ecmp": hashes flows over several'),
        (
            {"kind": "leaf_spine", "nodes_per_leaf": 4, "pod_oversubscription": 7},
            "cluster.topology.pod_oversubscription = 7: is given without ... give leaves_per_pod",
        ),
        ({"kind": "fat_tree", "radix": 4}, "radix = 4: ... 16 ... 3 ... 64"),
        ({"kind": "fat_tree", "radix": 7}, "radix = 7: ... ports ... switch"),
        ({"kind": "fat_tree", "radix": 8, "oversubscription": 2}, "use 1.666666667, for 5 ports to below and 3 to"),
        ({"kind": "fat_tree", "radix": 64, "levels": 4}, "cluster.topology.levels = 4: must be at most 3"),
        (
            {"kind": "dragonfly", "nodes_per_router": 1, "routers_per_group": 4, "global_gbit": 0},
            "cluster.topology.global_gbit = 0: must be at least 0.001",
        ),
        (
            {"kind": "sites", "nodes_per_site": 4, "gbit_per_site": 100},
            "cluster.topology.latency_s: is missing: ... connection ... give ... 5 ... e.g. latency_s: 0.01 ... 2000",
        ),
        ({"kind": "sites", "nodes_per_site": 4, "gbit_per_site": -1}, "gbit_per_site = -1: must be at least 0.001"),
        ({"kind": "sites", "nodes_per_site": 4, "gbit_per_site": 1e9}, "must be at most 1,000,000"),
        (
            {"kind": "sites", "nodes_per_site": 4, "gbit_per_site": 1, "inside": {"kind": "sites"}},
            'cluster.topology.inside.kind = "sites": ... possible here; ... leaf_spine ... fat_tree',
        ),
        (
            {"kind": "sites", "nodes_per_site": 4, "gbit_per_site": 1, "inside": {"kind": "fat_tree", "radix": 4}},
            "cluster.topology.inside.radix = 4: ... 16 ... 3 ... 32",
        ),
        ({"kind": "torus", "shape": [8]}, 'cluster.topology.kind = "torus": ... nvlink4 ... torus'),
        (
            {"kind": "switch", "node": {"kind": "nvlink"}},
            'cluster.topology.node.kind = "nvlink": is not a known choice',
        ),
        (
            {"kind": "graph", "links": [*TWO_RACKS, {"between": ["tor0", "tor0"], "gbit": 1}]},
            'cluster.topology.links.8.between = ["tor0", "tor0"]: ... tor0 to itself; name',
        ),
        ({"kind": "graph", "links": TWO_RACKS}, "links: node4 is not connected to node0, as are 3 more nodes"),
        ({"kind": "graph", "links": TWO_RACKS[1:]}, "cluster.topology.links: node0 ... link; add ... node0"),
        (
            {"kind": "graph", "links": [{"between": ["node0", "-"], "gbit": 1}]},
            'cluster.topology.links.0.between.1 = "-": ... begin ... letter',
        ),
        (
            {"kind": "graph", "links": [*TWO_RACKS, {"between": ["node12", "tor0"], "gbit": 1}]},
            "node12 ... node0 to node7; use",
        ),
        (
            {
                "kind": "graph",
                "links": [{"between": ["Node3", "tor0"], "gbit": 1}]
                + [{"between": [f"node{node}", "tor0"], "gbit": 1} for node in range(8) if node != 3],
            },
            "cluster.topology.links: node3 ... link; ... Node3?",
        ),
    ],
    ids=repr,
)
def test_bad_topologies_are_refused_with_a_fix(tmp_path: Path, topology: Any, sentence: str) -> None:
    assert says(refusal(tmp_path, topology), sentence)


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [
        (
            {"kind": "torus", "shape": [4, 4]},
            "shape = [4, 4]: ... 16 ... 64; use ... [8, 8]",
        ),
        ({"kind": "torus", "shape": [2, 2, 2, 8]}, "cluster.topology.shape = [2, 2, 2, 8]: ... most 3"),
        (
            {"kind": "rail", "nodes_per_group": 1},
            'kind = "rail": ... ici-tpu-v4 ... torus',
        ),
        (
            {"kind": "torus", "shape": [4, 4, 4], "node": {"kind": "pcie"}},
            "cluster.topology.node: devices ... torus ... remove",
        ),
    ],
    ids=repr,
)
def test_a_torus_must_multiply_up(tmp_path: Path, topology: Any, sentence: str) -> None:
    assert says(refusal(tmp_path, topology, **TORUS), sentence)
    assert cluster_of(tmp_path, {"kind": "torus", "shape": [4, 4, 4]}, **TORUS).topology == Torus(
        kind="torus", shape=(4, 4, 4)
    )


def test_too_many_links_are_refused(tmp_path: Path) -> None:
    many = {"kind": "leaf_spine", "nodes_per_leaf": 1, "routing": "ecmp", "spines": 1024}
    assert "at most 2,000,000 are simulated" in refusal(tmp_path, many, preset="dgx-h100", num_nodes=8192)


@pytest.mark.slow
def test_search_leaves_out_sizes_that_a_torus_cannot_have(tmp_path: Path) -> None:
    """Halves of 64 devices have another shape; those of a rail-optimized network have the same topology."""
    job = cluster_of(tmp_path, {"kind": "torus", "shape": [4, 4, 4]}, **TORUS)
    file = tmp_path / "search.yaml"
    degrees = "dp_replicate: [1, 2, 4, 8, 16, 32, 64], tp: [1], pp: [1]"
    space = f"search: {{objective: num_devices, {degrees}, recompute: [none], top: 1}}"
    text = (tmp_path / "case.yaml").read_text().replace("plan: {dp_replicate: 64}", space)
    file.write_text(text)
    best = load_search(file).search().best
    assert best is not None
    assert best.plan.num_devices == job.num_devices
    file.write_text(text.replace('{"kind": "torus", "shape": [4, 4, 4]}', "null"))
    smaller = load_search(file).search().best
    assert smaller is not None
    assert smaller.plan.num_devices < job.num_devices


def test_a_torus_of_fewer_devices_breaks_a_rule(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, {"kind": "torus", "shape": [4, 4, 4]}, **TORUS)
    job = job_of("gpt2-124m", {"dp_replicate": 32}, cluster=cluster.with_changes(num_devices=32))
    [problem] = [problem for problem in violations(job) if "topology" in problem.field]
    assert is_of(problem, "cluster.topology.shape", "[4, 4, 4]", rule="makes 64 devices")
    with refuses("cluster.topology.shape", rule="makes 64 devices, and the job"):
        fabric_of(job.cluster)


@pytest.mark.parametrize("name", catalog.names("topologies"))
def test_every_topology_of_the_catalog_joins_its_devices(name: str) -> None:
    topology = catalog.topology(name)
    assert catalog.topology_source(name)
    cluster = catalog.cluster("gb200-nvl72" if "gb200" in name else "dgx-a100-40gb", 1152)
    if isinstance(topology, Torus):
        size = 1
        for axis in topology.shape:
            size *= axis
        link = catalog.link("ici-tpu-v5e" if len(topology.shape) == 2 else "ici-tpu-v5p")
        cluster = cluster.with_changes(intra_link=link, devices_per_node=size, num_devices=size, inter_link=None)
    fabric = fabric_of(cluster.model_copy(update={"topology": topology}))
    assert fabric.path(0, fabric.num_devices - 1)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**7)
    | st.floats()
    | st.sampled_from(["rail", "graph", "node0", "s", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "between", "gbit"]), inner),
    max_leaves=6,
)
FIELDS = {name for spec in TOPOLOGIES.values() for name in spec.model_fields}
KEYS = st.sampled_from([*sorted(FIELDS), "preset", "x"])
KIND = st.sampled_from([*TOPOLOGIES])


@settings(max_examples=examples(50, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KIND | VALUES, st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_topology_is_read_or_refused(tmp_path: Path, kind: Any, values: dict[str, Any]) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(HOW + yaml.safe_dump({"cluster": {**NODES, "topology": {"kind": kind, **values}}}))
    try:
        cluster = load_scenario(file).job.cluster
    except SpecError:
        return
    fabric = fabric_of(cluster)
    assert fabric.path(0, 63)
