"""Drawing of a fabric as plain data: its layers of links, and a sample of its nodes with the switches above them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import Graph, Torus
from simplan.network.build import fabric_of
from simplan.network.fabric import Fabric, FabricLink
from simplan.network.graph import GraphInterconnect
from simplan.report.table import format_table_text
from simplan.units import format_rate, format_time

_SCHEMA_VERSION = 1
_MAX_NODES, _MAX_CARDS, _MAX_SWITCHES = 6, 8, 16  # drawn; of switches, per layer
_INDEX = re.compile(r"[0-9]+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """All links between two kinds of vertices, in one direction.

    Attributes:
        lower, upper: Kinds, e.g. ``nic`` and ``leaf``.
        num: Links.
        min_bytes_per_s, max_bytes_per_s: Bandwidth of the slowest and of the fastest.
        total_bytes_per_s: Bandwidth of all.
        latency_s: Largest latency in addition to that of the network.
    """

    lower: str
    upper: str
    num: int
    min_bytes_per_s: float
    max_bytes_per_s: float
    total_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node of the sample.

    Attributes:
        node: Index.
        num_devices: Devices.
        cards: Vertices at which links to switches end: network cards, at most 8; empty for a single node.
    """

    node: int
    num_devices: int
    cards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnSwitch:
    """A switch above the sample: vertex and name."""

    vertex: int
    name: str


@dataclass(frozen=True, slots=True)
class DrawnLayer:
    """Switches that are equally many links away from the nodes.

    Attributes:
        kinds: Kinds of its switches, e.g. ``leaf``.
        num: Switches of the fabric.
        switches: Those that are drawn.
    """

    kinds: str
    num: int
    switches: tuple[DrawnSwitch, ...]


@dataclass(frozen=True, slots=True)
class DrawnLink:
    """A cable between two drawn vertices.

    Attributes:
        link: Index of one of its directions in ``Fabric.links``.
        name: Name of that direction.
        lower, upper: Vertices.
        bytes_per_s: Bandwidth in one direction.
    """

    link: int
    name: str
    lower: int
    upper: int
    bytes_per_s: float


@dataclass(frozen=True)
class FabricDrawing:
    """Drawing of a fabric.

    Attributes:
        title: Cluster.
        words: Topology.
        num_nodes: Nodes of the cluster; the sample has fewer if there are many.
        device_kind: Kind of a device, e.g. ``gpu``.
        wiring: Kinds of vertices inside a node, e.g. ``nvlink4``; empty for nodes of one device.
        groups: Links by the kinds of their ends, from the devices up.
        nodes: Sample of nodes.
        layers: Switches above the sample, the lowest layer first.
        links: Cables between cards and switches of the sample.
        shape: Devices along the axes of a torus; empty for no torus.
        closes: True for each axis that is a ring.
    """

    title: str
    words: str
    num_nodes: int
    device_kind: str
    wiring: str
    groups: tuple[LinkGroup, ...]
    nodes: tuple[DrawnNode, ...]
    layers: tuple[DrawnLayer, ...]
    links: tuple[DrawnLink, ...]
    shape: tuple[int, ...] = ()
    closes: tuple[bool, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON of the drawing."""
        return {"kind": "network_drawing", "schema_version": _SCHEMA_VERSION, **asdict(self)}


def draw_fabric(cluster: ClusterSpec) -> FabricDrawing:
    """Drawing of the fabric of a cluster, with the nodes of background jobs.

    Raises:
        SpecError: The cluster cannot have its topology, or lacks a link.
    """
    cluster = cluster.fabric_cluster
    fabric, topology = fabric_of(cluster), cluster.topology
    nodes = tuple(_nodes(cluster, fabric))
    layers, links = _above(fabric, nodes, cluster)
    inside = dict.fromkeys(kind_of(fabric, link.destination) for link in fabric.links if link.is_inside_node)
    device_kind = kind_of(fabric, 0)
    torus, link = topology if isinstance(topology, Torus) else None, cluster.intra_link
    return FabricDrawing(
        title=f"{cluster.id}: {cluster.devices_in_words}, {cluster.nodes_in_words}",
        words="one switch for all nodes" if topology is None else topology.words(),
        num_nodes=cluster.num_nodes,
        device_kind=device_kind,
        wiring=", ".join(kind for kind in inside if kind != device_kind),
        groups=tuple(_groups(fabric)),
        nodes=nodes,
        layers=layers,
        links=links,
        shape=() if torus is None else torus.shape,
        closes=() if torus is None or link is None else torus.closes(link.torus_wrap),
    )


def fabric_text(drawing: FabricDrawing) -> str:
    """Title, topology, and a table of the links by the kinds of their ends."""
    headers = ["links", "number", "each way", "total"]
    rows = [
        [f"{group.lower} - {group.upper}", f"{group.num:,}", _each(group), format_rate(group.total_bytes_per_s)]
        for group in drawing.groups
    ]
    return f"{drawing.title}\n{drawing.words}\n\n{format_table_text(headers, rows, indent=2, left=1)}"


def rate_words(group: LinkGroup) -> str:
    """Number of links of a group, and their bandwidth."""
    return f"{group.num:,} x {_each(group)}"


def _each(group: LinkGroup) -> str:
    """Bandwidth of each link of a group."""
    words = format_rate(group.max_bytes_per_s)
    if group.max_bytes_per_s > group.min_bytes_per_s * 1.001:
        words = f"{format_rate(group.min_bytes_per_s)} to {words}"
    return f"{words}, {format_time(group.latency_s)}" if group.latency_s else words


def kind_of(fabric: Fabric, vertex: int) -> str:
    """Kind of a vertex: its name without the indices of what it belongs to, and without its own.

    A link id such as ``nvlink4`` keeps its digits. All switches of a free graph are of one kind, whatever their names.
    """
    name = fabric.vertices[vertex].rpartition(".")[2]
    if fabric.wiring is not None and fabric.wiring.node_of(vertex) is not None and not name.startswith("pcie"):
        return name
    kind = _INDEX.sub("", name) or name
    is_free = isinstance(fabric.interconnect, GraphInterconnect) and "." not in fabric.vertices[vertex]
    return "switch" if is_free and kind != "node" else kind


def _groups(fabric: Fabric) -> Iterator[LinkGroup]:
    """Links by the kinds of their ends; of a cable, one direction."""
    groups: dict[tuple[str, str], list[FabricLink]] = {}
    for link in fabric.links:
        if link.source < link.destination:
            groups.setdefault((kind_of(fabric, link.source), kind_of(fabric, link.destination)), []).append(link)
    for (lower, upper), links in groups.items():
        rates = [link.bytes_per_s for link in links]
        latency_s = max(link.latency_s for link in links)
        yield LinkGroup(lower, upper, len(links), min(rates), max(rates), sum(rates), latency_s)


def _nodes(cluster: ClusterSpec, fabric: Fabric) -> Iterator[DrawnNode]:
    """The first nodes, the last of the first domain of a switch, and those at the ends of the last such domain."""
    for node in _sample(cluster, fabric):
        first = node * cluster.devices_per_node
        devices = min(cluster.devices_per_node, cluster.num_devices - first)
        if isinstance(cluster.topology, Graph) and cluster.num_nodes > 1:
            cards = (fabric.vertices.index(f"node{node}"),)
        else:
            cards = tuple(dict.fromkeys(fabric.card_of_device[first : first + devices].tolist()))
        yield DrawnNode(node, devices, cards[:_MAX_CARDS])


def _sample(cluster: ClusterSpec, fabric: Fabric) -> Sequence[int]:
    last = cluster.num_nodes - 1
    if last < _MAX_NODES or isinstance(cluster.topology, Torus):
        return range(1 if isinstance(cluster.topology, Torus) else last + 1)
    for _, domain in fabric.levels[1:]:
        of_node = domain[:: cluster.devices_per_node].tolist()
        first_domain = [node for node, place in enumerate(of_node) if place == of_node[0]]
        if len(first_domain) > 1:
            last_domain = [node for node, place in enumerate(of_node) if place == of_node[-1]]
            return sorted({0, 1, first_domain[-1], last_domain[0], last})
    return (0, 1, 2, last)


def _above(
    fabric: Fabric, nodes: Sequence[DrawnNode], cluster: ClusterSpec
) -> tuple[tuple[DrawnLayer, ...], tuple[DrawnLink, ...]]:
    """Switches on the paths between drawn nodes, by layer, and the links of those paths."""
    if not nodes[0].cards or fabric.interconnect is None or isinstance(cluster.topology, Torus):
        return (), ()
    cards = [card for node in nodes for card in node.cards]
    used = {
        link
        for source, end in product(cards, repeat=2)
        if source != end
        for link in fabric.interconnect.path(source, end)
    }
    distance = _distances(fabric, isinstance(cluster.topology, Graph))
    seen = {vertex for link in used for vertex in (fabric.links[link].source, fabric.links[link].destination)}
    shown: set[int] = set(cards)
    layers = []
    for layer in range(1, max(distance.values()) + 1):
        of_layer = [vertex for vertex, number in distance.items() if number == layer]
        switches = sorted(vertex for vertex in of_layer if vertex in seen)[:_MAX_SWITCHES]
        kinds = dict.fromkeys(kind_of(fabric, vertex) for vertex in of_layer)
        drawn = tuple(DrawnSwitch(vertex, fabric.vertices[vertex]) for vertex in switches)
        layers.append(DrawnLayer(", ".join(kinds), len(of_layer), drawn))
        shown |= set(switches)
    links = []
    for index in sorted(used):
        link = fabric.links[index]
        if {link.source, link.destination} <= shown and (distance[link.source], link.source) < (
            distance[link.destination],
            link.destination,
        ):
            links.append(DrawnLink(index, link.name, link.source, link.destination, link.bytes_per_s))
    return tuple(layers), tuple(links)


def _distances(fabric: Fabric, is_graph: bool) -> dict[int, int]:
    """Number of links from the nearest node, by vertex: 0 for network cards, or for the nodes of a graph."""
    neighbors: dict[int, list[int]] = {}
    for link in fabric.links:
        if not link.is_inside_node:
            neighbors.setdefault(link.source, []).append(link.destination)
    cards = set(fabric.card_of_device.tolist())
    if is_graph:  # network cards lead to the vertex of their node
        cards = {vertex for card in cards for vertex in neighbors[card]}
    distances = dict.fromkeys(sorted(cards), 0)
    border, distance = list(distances), 0
    while border:
        distance += 1
        border = [other for vertex in border for other in neighbors[vertex] if other not in distances]
        border = [vertex for vertex in dict.fromkeys(border) if ".nic" not in fabric.vertices[vertex]]
        distances |= dict.fromkeys(border, distance)
    return distances
