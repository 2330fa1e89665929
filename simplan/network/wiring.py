"""Wiring of the devices inside nodes: a switch, a PCIe tree, or a torus."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import Torus
from simplan.network.fabric import GraphBuilder, Wiring


def devices_of_nodes(cluster: ClusterSpec) -> Iterator[range]:
    """Devices of each node; the last node may not be full."""
    for node in range(cluster.num_nodes):
        first = node * cluster.devices_per_node
        yield range(first, min(first + cluster.devices_per_node, cluster.num_devices))


class SwitchWiring(Wiring):
    """All devices of a node on one switch, each by a link of its own.

    Devices that are wired without a switch (xGMI, NVLink of a DGX-1) have the same links: of all links of a device
    together, of which a group can use a part (``LinkSpec.part_of_node``).
    """

    def __init__(self, builder: GraphBuilder, cluster: ClusterSpec) -> None:
        link = cluster.intra_link
        assert link is not None, "devices of one node have a link"
        self._per_node = cluster.devices_per_node
        self._first_switch = len(builder.vertices)
        self._num_nodes = cluster.num_nodes
        self._first_link = len(builder.links)
        for node in range(cluster.num_nodes):
            builder.add_vertex(f"node{node}.{link.id}")
        for node, devices in enumerate(devices_of_nodes(cluster)):
            for device in devices:
                builder.add_cable(device, self._first_switch + node, link.bytes_per_s, is_inside_node=True)

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """Links between two different vertices of one node."""
        links = []
        if source < self._first_switch:
            links.append(self._first_link + 2 * source)
        if destination < self._first_switch:
            links.append(self._first_link + 2 * destination + 1)
        return tuple(links)

    def node_of(self, vertex: int) -> int | None:
        """Node of a switch; None for any other vertex."""
        node = vertex - self._first_switch
        return node if 0 <= node < self._num_nodes else None

    def switch_of(self, node: int) -> int | None:
        """Switch of a node."""
        return self._first_switch + node


class PcieWiring(Wiring):
    """Devices of a node below its host, perhaps below PCIe switches; network cards are at the host."""

    def __init__(
        self, builder: GraphBuilder, cluster: ClusterSpec, devices_per_switch: int | None, *, peer_to_peer: bool
    ) -> None:
        link = cluster.intra_link
        assert link is not None, "devices of one node have a link"
        self._peer_to_peer = peer_to_peer
        self._first_vertex = len(builder.vertices)
        self._nodes: list[int] = []  # of each vertex that is no device
        self._up: dict[int, int] = {}  # vertex -> its link to above; the link back follows
        self._above: dict[int, int] = {}
        for node, devices in enumerate(devices_of_nodes(cluster)):
            num_switches = -(-len(devices) // devices_per_switch) if devices_per_switch else 0
            switches = [self._add_vertex(builder, f"node{node}.pcie{place}", node) for place in range(num_switches)]
            host = self._add_vertex(builder, f"node{node}.host", node)
            for place, device in enumerate(devices):
                above = switches[place // devices_per_switch] if devices_per_switch else host
                self._join(builder, device, above, link.bytes_per_s)
            for switch in switches:
                self._join(builder, switch, host, link.bytes_per_s)

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """Links between two different vertices of one node."""
        up, down = [*self._ascent(source)], [*self._ascent(destination)]
        between_devices = source < self._first_vertex and destination < self._first_vertex
        if self._peer_to_peer or not between_devices:
            while up and down and up[-1] == down[-1]:  # above the lowest common vertex
                up.pop()
                down.pop()
        return (*up, *(link + 1 for link in reversed(down)))

    def exit_path(self, device: int) -> tuple[int, ...]:
        """Links from a device to the host, where the network cards are."""
        return tuple(self._ascent(device))

    def entry_path(self, device: int) -> tuple[int, ...]:
        """Links from the host to a device."""
        return tuple(link + 1 for link in reversed([*self._ascent(device)]))

    def node_of(self, vertex: int) -> int | None:
        """Node of a host or PCIe switch; None for any other vertex."""
        place = vertex - self._first_vertex
        return self._nodes[place] if 0 <= place < len(self._nodes) else None

    def _add_vertex(self, builder: GraphBuilder, name: str, node: int) -> int:
        self._nodes.append(node)
        return builder.add_vertex(name)

    def _join(self, builder: GraphBuilder, below: int, above: int, bytes_per_s: float) -> None:
        self._up[below] = builder.add_cable(below, above, bytes_per_s, is_inside_node=True)
        self._above[below] = above

    def _ascent(self, vertex: int) -> Iterator[int]:
        """Links from a vertex up to the host."""
        while vertex in self._up:
            yield self._up[vertex]
            vertex = self._above[vertex]


class TorusWiring(Wiring):
    """Devices of a slice on a torus, the last axis numbered first.

    Flows go along the axes in order, on each the shorter way around; of two ways of the same length, devices with an
    even coordinate sum take the one upward.
    """

    def __init__(self, builder: GraphBuilder, cluster: ClusterSpec, torus: Torus) -> None:
        link, shape = cluster.intra_link, torus.shape
        assert link is not None, "devices of one slice have a link"
        self._shape = shape
        self._closes = torus.closes(link.torus_wrap)
        self._strides = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            self._strides[axis] = self._strides[axis + 1] * shape[axis + 1]
        self._size = self._strides[0] * shape[0]
        self._links: dict[tuple[int, int, int], int] = {}  # device, axis, direction
        for device in range(cluster.num_devices):
            for axis in range(len(shape)):
                neighbor = self._neighbor(device, axis, 1)
                if neighbor is not None:
                    index = builder.add_cable(device, neighbor, link.bytes_per_s, is_inside_node=True)
                    self._links[device, axis, 1] = index
                    self._links[neighbor, axis, -1] = index + 1

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """Links between two different devices of one slice."""
        links, place = [], source
        of_source, of_destination = self._coordinates(source), self._coordinates(destination)
        for axis, (start, end) in enumerate(zip(of_source, of_destination, strict=True)):
            hops, length = end - start, self._shape[axis]
            if self._closes[axis]:
                hops %= length
                if 2 * hops > length or (2 * hops == length and sum(of_source) % 2):
                    hops -= length
            direction = 1 if hops > 0 else -1
            for _ in range(abs(hops)):
                links.append(self._links[place, axis, direction])
                neighbor = self._neighbor(place, axis, direction)
                assert neighbor is not None, "a hop stays on the axis"
                place = neighbor
        return tuple(links)

    def node_of(self, vertex: int) -> int | None:
        """None: a torus has no other vertices."""
        del vertex
        return None

    def _coordinates(self, device: int) -> tuple[int, ...]:
        place = device % self._size
        return tuple(place // stride % length for stride, length in zip(self._strides, self._shape, strict=True))

    def _neighbor(self, device: int, axis: int, direction: int) -> int | None:
        """Next device along an axis; None at the end of an axis that does not close."""
        coordinate, length = self._coordinates(device)[axis], self._shape[axis]
        after = coordinate + direction
        if not 0 <= after < length:
            if not self._closes[axis]:
                return None
            after %= length
        return device + (after - coordinate) * self._strides[axis]
