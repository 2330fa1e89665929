"""Drawings of fabrics: the data against the graph of links, the SVG as XML against the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import TOPOLOGIES
from simplan.network.build import fabric_of
from simplan.problems import parse_model
from simplan.report.drawings.fabric_drawing import draw_fabric, fabric_text
from simplan.report.drawings.fabric_svg import fabric_svg
from simplan.scenario import load_scenario

DOCS = Path(__file__).resolve().parents[2] / "docs" / "how-to"
SVG = "{http://www.w3.org/2000/svg}"
RING = [{"between": [f"s{place}", f"s{(place + 1) % 4}"], "gbit": 100 if place else 10} for place in range(4)]
HOSTS = [{"between": [f"node{node}", f"s{node % 4}"], "gbit": 400} for node in range(32)]
CASES: list[dict[str, Any]] = [
    {"kind": "switch"},
    {"kind": "switch", "node": {"kind": "pcie", "devices_per_switch": 2}},
    {"kind": "leaf_spine", "nodes_per_leaf": 4, "oversubscription": 4, "spines": 4, "routing": "ecmp"},
    {"kind": "leaf_spine", "nodes_per_leaf": 2, "leaves_per_pod": 4, "pod_oversubscription": 7},
    {"kind": "rail", "nodes_per_group": 8},
    {"kind": "fat_tree", "radix": 16, "routing": "ecmp"},
    {"kind": "dragonfly", "nodes_per_router": 2, "routers_per_group": 4, "global_gbit": 400},
    {"kind": "sites", "nodes_per_site": 8, "gbit_per_site": 100, "latency_s": 0.01},
    {"kind": "graph", "links": [*RING, *HOSTS]},
]


def cluster_with(topology: dict[str, Any], num_devices: int) -> ClusterSpec:
    spec = parse_model(TOPOLOGIES[topology["kind"]], topology)
    return catalog.cluster("dgx-h100", num_devices).model_copy(update={"topology": spec})


def rectangles(svg: str) -> list[tuple[float, ...]]:
    root = ElementTree.fromstring(svg)
    keys = ("x", "y", "width", "height")
    return [tuple(float(part.attrib[key]) for key in keys) for part in root.iter(f"{SVG}rect")]


@pytest.mark.parametrize("topology", CASES, ids=lambda case: "-".join(map(str, case.values()))[:40])
def test_drawing_counts_every_link_once(topology: dict[str, Any]) -> None:
    cluster = cluster_with(topology, 256)
    drawing, fabric = draw_fabric(cluster), fabric_of(cluster)
    assert 2 * sum(group.num for group in drawing.groups) == len(fabric.links)
    total = sum(group.total_bytes_per_s for group in drawing.groups)
    assert total == pytest.approx(sum(link.bytes_per_s for link in fabric.links) / 2)
    ends = {switch.vertex for layer in drawing.layers for switch in layer.switches}
    ends |= {card for node in drawing.nodes for card in node.cards}
    assert all({link.lower, link.upper} <= ends for link in drawing.links)
    assert json.loads(json.dumps(drawing.to_json()))["num_nodes"] == 32
    assert all(group.upper in fabric_text(drawing) for group in drawing.groups)
    svg = fabric_svg(drawing)
    (_, _, width, height), *parts = rectangles(svg)
    assert all(x >= 0 and x + w <= width and y >= 0 and y + h <= height for x, y, w, h in parts), "inside the page"
    switches = [(x, y, w) for x, y, w, h in parts if h == 26]
    assert len(switches) == sum(len(layer.switches) for layer in drawing.layers)
    for x, y, w in switches:
        assert not any(y == other_y and 0 < abs(x - other_x) < w for other_x, other_y, _ in switches), "no overlap"


def test_many_nodes_are_a_sample_of_both_ends() -> None:
    drawing = draw_fabric(cluster_with({"kind": "leaf_spine", "nodes_per_leaf": 4}, 4096))
    assert [node.node for node in drawing.nodes] == [0, 1, 3, 508, 511]
    [leaves, spine] = drawing.layers
    assert (leaves.kinds, leaves.num, [switch.name for switch in leaves.switches]) == (
        "leaf",
        128,
        ["leaf0", "leaf127"],
    )
    assert (spine.kinds, spine.num) == ("spine", 1)
    assert len(fabric_svg(drawing)) < 40_000


def test_picture_of_the_docs_is_that_of_its_scenario(tmp_path: Path) -> None:
    """``simplan draw network.yaml --network -o docs/how-to/network.svg`` writes it again."""
    page = (DOCS / "network.md").read_text()
    file = tmp_path / "network.yaml"
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert fabric_svg(draw_fabric(load_scenario(file).job.cluster)) == (DOCS / "network.svg").read_text()


def test_names_of_a_graph_are_text_in_the_picture() -> None:
    links = [{"between": [f"node{node}", "tor.a_b-c"], "gbit": 1} for node in range(2)]
    svg = fabric_svg(draw_fabric(cluster_with({"kind": "graph", "links": links}, 16)))
    assert "tor.a_b-c" in svg
    ElementTree.fromstring(svg)


@pytest.mark.parametrize(("shape", "rings"), [([4, 4, 16], [True, True, True]), ([2, 8], [False, True]), ([6], [True])])
def test_torus_is_a_grid_of_its_last_axes(shape: list[int], rings: list[bool]) -> None:
    size = 1
    for axis in shape:
        size *= axis
    cluster = catalog.cluster("dgx-h100", 8).with_changes(
        intra_link=catalog.link("ici-tpu-v4"), devices_per_node=size, num_devices=size
    )
    cluster = cluster.model_copy(
        update={"topology": parse_model(TOPOLOGIES["torus"], {"kind": "torus", "shape": shape})}
    )
    drawing = draw_fabric(cluster)
    assert list(drawing.closes) == rings
    devices = [part for part in rectangles(fabric_svg(drawing)) if part[2:] == (18, 18)]
    assert len(devices) == min(shape[-1], 8) * (shape[-2] if len(shape) > 1 else 1)
