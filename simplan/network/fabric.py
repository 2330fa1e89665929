"""Graph of the links and switches of a cluster, and the path of a flow between two of its vertices.

A *device* is a physical place from 0 to N-1; devices fill the nodes in order. A *link* is one direction of a cable, or
of a bundle of cables. A path consists of a part inside the node of its source, links between nodes, and a part inside
the node of its destination. Paths follow from the structure (``simplan.network.wiring``, ``simplan.network.tree``,
``simplan.network.dragonfly``); only a free graph searches for them (``simplan.network.graph``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.errors import Problem, SpecError, did_you_mean

_MAX_CACHED_PATHS = 1_000_000


class FabricLink(NamedTuple):
    """One direction of a cable, or of a bundle of cables.

    Attributes:
        name: Both ends, e.g. ``leaf0 -> spine``.
        bytes_per_s: Datasheet bandwidth.
        latency_s: Latency in addition to that of the cluster's links (``LinkSpec.latency_s``).
        is_inside_node: True for a link inside a node, where ``ClusterSpec.intra_link`` has the efficiencies.
        source, destination: Vertices.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    is_inside_node: bool
    source: int
    destination: int


Route = tuple[tuple[int, ...], float]
"""Links of a path in order, and the share of a flow's bytes on it."""
Level = tuple[str, NDArray[np.int32]]
"""Kind of a domain, such as ``leaf``, and the domain of each device."""


class Wiring(ABC):
    """Wiring inside all nodes."""

    @abstractmethod
    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """Links between two different vertices of one node."""

    def exit_path(self, device: int) -> tuple[int, ...]:
        """Links from a device to its network card, which the card itself does not have."""
        del device
        return ()

    def entry_path(self, device: int) -> tuple[int, ...]:
        """Links from the network card of a device to the device."""
        del device
        return ()

    @abstractmethod
    def node_of(self, vertex: int) -> int | None:
        """Node of a vertex inside a node that is no device; None for any other vertex."""

    def switch_of(self, node: int) -> int | None:
        """Switch that joins the devices of a node; None if there is none that could reduce."""
        del node
        return None


class Interconnect(ABC):
    """Links and switches between nodes. Its vertices are the network cards of nodes and the switches."""

    has_detours: bool = False
    """True for adaptive routing that leaves the path of a flow where a link is full."""
    num_connections: int = 1
    """Connections between two network cards; a hash picks the path of each."""
    has_routes: bool = False
    """True if a flow may take several paths."""

    @abstractmethod
    def path(self, source: int, destination: int, connection: int = 0) -> tuple[int, ...]:
        """Links of a connection between two different vertices."""

    def routes(self, source: int, destination: int) -> tuple[Route, ...]:
        """Paths between two different vertices, and the share of the bytes on each; equal connections by default."""
        number = self.num_connections
        if number == 1:
            return ((self.path(source, destination), 1.0),)
        counts = Counter(self.path(source, destination, connection) for connection in range(number))
        return tuple((path, count / number) for path, count in counts.items())

    def detours(self, link: int) -> Sequence[tuple[int, ...]]:
        """Other paths from one end of a link to the other that adaptive routing takes; none by default."""
        del link
        return ()

    def switch_of(self, cards: Sequence[int]) -> int | None:
        """Lowest switch above all of some network cards; None if there is none."""
        del cards
        return None

    def levels(self, card_of: NDArray[np.int32]) -> tuple[Level, ...]:
        """Domains of switches, innermost first, without those that hold all devices.

        Args:
            card_of: ``(num_devices,)`` vertex of the network card of each device.
        """
        del card_of
        return ()


@dataclass(frozen=True, eq=False)
class Fabric:
    """Links and switches of a cluster.

    Attributes:
        num_devices: Devices.
        vertices: Names; the first ``num_devices`` are devices, the rest network cards, hosts and switches.
        links: Directed links.
        levels: Domains of devices, innermost first: ``node``, then those of the switches between nodes. Devices of one
            domain reach each other without the links above it.
        is_symmetric: True if domains of a level are alike and flows between other pairs of domains take other links in
            the same way. False where a hash or the position decides about links.
        wiring: Wiring inside nodes; None for nodes of one device.
        interconnect: Links between nodes; None for a single node.
        node_of_device: ``(num_devices,)`` node of each device.
        card_of_device: ``(num_devices,)`` vertex of the network card of each device; empty for a single node.
    """

    num_devices: int
    vertices: tuple[str, ...]
    links: tuple[FabricLink, ...]
    levels: tuple[Level, ...]
    is_symmetric: bool
    wiring: Wiring | None
    interconnect: Interconnect | None
    node_of_device: NDArray[np.int32]
    card_of_device: NDArray[np.int32]
    _paths: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, repr=False)
    _routes: dict[tuple[int, int], tuple[Route, ...]] = field(default_factory=dict, repr=False)

    @property
    def num_connections(self) -> int:
        """Connections of a flow between nodes; see ``Interconnect``."""
        return 1 if self.interconnect is None else self.interconnect.num_connections

    @cached_property
    def has_distance(self) -> bool:
        """True if a link has a latency of its own."""
        return any(link.latency_s for link in self.links)

    def routes(self, source: int, destination: int) -> tuple[Route, ...]:
        """Paths that a flow takes from one vertex to another, each with the share of its bytes."""
        routes = self._routes.get((source, destination))
        if routes is None:
            routes = self._find_routes(source, destination)
            if len(self._routes) < _MAX_CACHED_PATHS:
                self._routes[source, destination] = routes
        return routes

    def _find_routes(self, source: int, destination: int) -> tuple[Route, ...]:
        if self.interconnect is None or not self.interconnect.has_routes or self._is_inside_node(source, destination):
            return ((self._find_path(source, destination), 1.0),)
        before, first = self._way_out(source)
        after, last = self._way_in(destination)
        if first == last:
            return (((*before, *after), 1.0),)
        return tuple(((*before, *path, *after), share) for path, share in self.interconnect.routes(first, last))

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """Links of the first connection from one vertex to another, in order; empty from a vertex to itself.

        The same pair always has the same path. Between switches of different layers, the path is that of a reduction
        tree.
        """
        key = (source, destination)
        path = self._paths.get(key)
        if path is None:
            path = self._find_path(source, destination)
            if len(self._paths) < _MAX_CACHED_PATHS:
                self._paths[key] = path
        return path

    def switch_of(self, devices: Sequence[int], *, inside_node: bool) -> int | None:
        """Vertex of the lowest switch above all devices, where an in-network reduction meets; None without such a one.

        Args:
            devices: Devices; of one node for ``inside_node``.
            inside_node: True for the switch of the node, False for one between nodes.
        """
        if inside_node:
            return None if self.wiring is None else self.wiring.switch_of(int(self.node_of_device[devices[0]]))
        if self.interconnect is None:
            return None
        return self.interconnect.switch_of([int(self.card_of_device[device]) for device in devices])

    def link_named(self, name: str) -> int:
        """Index of a link.

        Raises:
            SpecError: There is no such link; names the nearest.
        """
        for index, link in enumerate(self.links):
            if link.name == name:
                return index
        ends = name.partition(" -> ")[0]
        near = [link.name for link in self.links if link.name.startswith(f"{ends} -> ")]
        fix = did_you_mean(name, near or [link.name for link in self.links[:10_000]])
        raise SpecError(Problem(field="link", value=name, rule="is no link of the fabric", fix=fix))

    def _node_of(self, vertex: int) -> int | None:
        if vertex < self.num_devices:
            return int(self.node_of_device[vertex])
        return None if self.wiring is None else self.wiring.node_of(vertex)

    def _is_inside_node(self, source: int, destination: int) -> bool:
        node = self._node_of(source)
        return node is not None and node == self._node_of(destination)

    def _find_path(self, source: int, destination: int) -> tuple[int, ...]:
        if source == destination:
            return ()
        if self._is_inside_node(source, destination):
            assert self.wiring is not None, "a node with two devices has a wiring"
            return self.wiring.path(source, destination)
        assert self.interconnect is not None, "vertices of two nodes are joined"
        before, first = self._way_out(source)
        after, last = self._way_in(destination)
        between = self.interconnect.path(first, last) if first != last else ()
        return (*before, *between, *after)

    def _way_out(self, vertex: int) -> tuple[tuple[int, ...], int]:
        """Links from a vertex to the interconnect, and where they end."""
        if vertex >= self.num_devices:
            return (), vertex
        links = () if self.wiring is None else self.wiring.exit_path(vertex)
        return links, int(self.card_of_device[vertex])

    def _way_in(self, vertex: int) -> tuple[tuple[int, ...], int]:
        """Links from the interconnect to a vertex, and where they begin."""
        if vertex >= self.num_devices:
            return (), vertex
        links = () if self.wiring is None else self.wiring.entry_path(vertex)
        return links, int(self.card_of_device[vertex])


class GraphBuilder:
    """Vertices and links of a fabric under construction."""

    def __init__(self) -> None:
        self.vertices: list[str] = []
        self.links: list[FabricLink] = []
        self._num_named: Counter[str] = Counter()

    def add_vertex(self, name: str) -> int:
        """Adds a vertex; returns its index."""
        self.vertices.append(name)
        return len(self.vertices) - 1

    def add_link(
        self, source: int, destination: int, bytes_per_s: float, *, latency_s: float = 0.0, is_inside_node: bool = False
    ) -> int:
        """Adds a link in one direction; returns its index."""
        name = f"{self.vertices[source]} -> {self.vertices[destination]}"
        self._num_named[name] += 1
        if self._num_named[name] > 1:  # parallel cables
            name = f"{name} #{self._num_named[name]}"
        self.links.append(FabricLink(name, bytes_per_s, latency_s, is_inside_node, source, destination))
        return len(self.links) - 1

    def add_cable(
        self, first: int, second: int, bytes_per_s: float, *, latency_s: float = 0.0, is_inside_node: bool = False
    ) -> int:
        """Adds a link in each direction; returns the index of the first, and the other one follows."""
        index = self.add_link(first, second, bytes_per_s, latency_s=latency_s, is_inside_node=is_inside_node)
        self.add_link(second, first, bytes_per_s, latency_s=latency_s, is_inside_node=is_inside_node)
        return index


def hash_of_flow(source: int, destination: int, connection: int = 0, seed: int = 0) -> int:
    """Hash of a connection between two network cards, which decides about its path: the finalizer of SplitMix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    value = source * 0x9E3779B97F4A7C15 + destination * 0xD1342543DE82EF95 + 1
    value = (value + connection * 0xA0761D6478BD642F + seed * 0xE7037ED1A0B428DB) & _64_BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return value ^ (value >> 31)


_64_BITS = 2**64 - 1
