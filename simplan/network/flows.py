"""Flows of a communication: pairs of devices that send to each other, and the bytes of each pair.

The closed forms of ``simplan.cost.communication`` say how long an algorithm takes on a network with two tiers. Flows
say where its bytes go, so that links can be shared with other traffic. Both describe the same algorithm: on a network
without oversubscription, the busiest link needs the transfer time of the closed form.

=================== ===================================================================================================
pattern             flows, with k ranks in each of N nodes
=================== ===================================================================================================
ring                one ring per local rank (NCCL's channels), with a k-th of the bytes: once round the node, and from
                    the network card at which it entered to the same card of the next node
tree                a chain in each node, and two binary trees over the nodes per local rank (NCCL's double binary
                    tree), each with half of the bytes, up and down
NVLS                between each device and the switch, which reduces and multicasts; trees between nodes
pairwise            from every rank to every other
once per node       to the rank at the same place of each other node; from there to the other ranks of the node
hop                 from source to destination, or from each rank to the next
torus               between neighbors along each axis, in both directions
gloo ring           from each rank to the next, in the order of ranks
binomial tree       from the root to 1, 2, 4 ... other ranks, which forward likewise
halving_doubling    between ranks at distance 1, 2, 4 ... of the order by nodes
hierarchical        a ring in each node, and one over the ranks at each place of all nodes; all-to-all likewise
SHARP               as NVLS or pairwise in the node; along a tree of switches over the ranks at each place of all nodes
parameter server    a ring in each node; between the ranks at each place of all nodes and of every node that serves
=================== ===================================================================================================

Nodes are in the order of the first rank on each, which is that of the hostfile or of ``plan.placement``; the order of
devices inside a node is that of the hardware.

Sources: NVIDIA/nccl, src/init.cc (``initTransportsRank`` numbers nodes by their first rank), src/graph/connect.cc and
src/graph/trees.cc (rings by channel, ``ncclGetDtree``), and PXN, by which the last rank of a node sends over the
network card of another (NVIDIA, "Doubling all2all Performance with NCCL 2.12"); pytorch/gloo, gloo/broadcast.cc;
jax-ml/scaling-book, sharding.md (torus).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import Torus
from simplan.cost.communication.algorithm import CommAlgorithm, Pattern
from simplan.cost.communication.gloo import broadcast_phases
from simplan.cost.communication.nccl import LAPS
from simplan.model.layer import CollectiveKind
from simplan.network.fabric import Fabric
from simplan.program.program import Communication


class Flow(NamedTuple):
    """Bytes from one vertex of the network to another, over a whole collective.

    Attributes:
        source, destination: Devices, or vertices of switches that reduce and multicast.
        share: Bytes as a fraction of ``Communication.num_bytes``.
        phase: Phase of the collective, from 0.
    """

    source: int
    destination: int
    share: float
    phase: int = 0


class Flows(NamedTuple):
    """All flows of a communication, one per ordered pair of vertices and phase.

    Attributes:
        sources, destinations, phases: ``(num_flows,)`` As in ``Flow``.
        shares: ``(num_flows,)`` As in ``Flow``; all positive.
    """

    sources: NDArray[np.int32]
    destinations: NDArray[np.int32]
    shares: NDArray[np.float64]
    phases: NDArray[np.int32]

    def each(self) -> Iterator[Flow]:
        """Flows one by one."""
        return map(Flow, self.sources.tolist(), self.destinations.tolist(), self.shares.tolist(), self.phases.tolist())


Nodes = list[list[int]]
"""Devices of a group, ascending in each node; nodes are in the order of the first rank on each."""


class _Axis(NamedTuple):
    """Ranks of a group along one axis of a torus.

    Attributes:
        lines: Devices in order along the axis, one list for each position on the other axes.
        closes: The last of a line is a neighbor of the first.
    """

    lines: list[list[int]]
    closes: bool


def flows_of(
    way: CommAlgorithm, communication: Communication, devices: Sequence[int], cluster: ClusterSpec, fabric: Fabric
) -> Flows:
    """Returns the flows of a communication among two or more ranks.

    Args:
        way: Algorithm of the communication on this cluster.
        communication: Collective or P2P transfer.
        devices: Device of each of ``communication.ranks``, in their order: that of ranks, but for a broadcast, which
            lists its root first.
        cluster: Cluster, whose devices fill nodes in order.
        fabric: Fabric that reduce and multicast.
    """
    by_rank = devices
    if communication.kind is CollectiveKind.BROADCAST:
        by_rank = [device for _, device in sorted(zip(communication.ranks, devices, strict=True))]
    group = _Group(communication, devices, _by_node(by_rank, cluster), way.server_shares, cluster, fabric)
    node_of = {device: number for number, members in enumerate(group.nodes) for device in members}
    by_tier = len(way.moves) > 1 and way.pattern is not Pattern.PARAMETER_SERVER
    flows: defaultdict[tuple[int, int, int], float] = defaultdict(float)
    for source, destination, share, phase in _FLOWS[way.pattern](group):
        if share > 0:
            number = int(node_of[source] != node_of[destination]) if by_tier else phase
            flows[source, destination, number] += share
    pairs = np.array([*flows], dtype=np.int32).reshape(-1, 3)
    return Flows(pairs[:, 0], pairs[:, 1], np.array([*flows.values()]), pairs[:, 2])


def phase_shares(way: CommAlgorithm, num_ranks: int) -> tuple[float, ...]:
    """Returns the fraction of the transfer time that each phase of an algorithm takes.

    Algorithms for two tiers are first inside nodes and then between them (an all-reduce then inside nodes again, which
    is counted with the first phase). Between nodes, parameter servers have one phase of push and one of pull. Rings and
    trees are pipelined, so that all their flows run at the same time.
    """
    if way.pattern is Pattern.BINOMIAL_TREE:
        durations = [float(phase.duration) for phase in broadcast_phases(num_ranks)]
    else:
        durations = [move.factor / move.bytes_per_s for move in way.moves]
    return tuple(duration / sum(durations) for duration in durations)


class _Group(NamedTuple):
    """A communication and the devices of its ranks; other attributes as in ``flows_of``.

    Attributes:
        nodes: See ``Nodes``.
        server_shares: Fraction of the bytes on each parameter server; empty for other algorithms.
    """

    communication: Communication
    devices: Sequence[int]
    nodes: Nodes
    server_shares: tuple[float, ...]
    cluster: ClusterSpec
    fabric: Fabric

    @property
    def kind(self) -> CollectiveKind:
        """Kind of the communication."""
        return self.communication.kind

    @property
    def num_channels(self) -> int:
        """Ranks in the node with the fewest; each has a ring, or two trees, over its own network card."""
        return min(map(len, self.nodes))

    def ranks_at(self, place: int) -> list[int]:
        """Devices at one place of each node."""
        return [members[place] for members in self.nodes]


def _by_node(devices: Sequence[int], cluster: ClusterSpec) -> Nodes:
    """Groups devices, which are in the order of ranks, by node."""
    nodes: dict[int, list[int]] = {}
    for device in devices:
        nodes.setdefault(cluster.node_of(device), []).append(device)
    return [*map(sorted, nodes.values())]


def _ring_share(kind: CollectiveKind, num_ranks: int) -> float:
    """Returns the bytes that each rank sends to the next in a ring, over ``num_bytes``."""
    return LAPS[kind] * (num_ranks - 1) / num_ranks


def _cycle(members: Sequence[int], share: float) -> Iterator[Flow]:
    """Yields a flow from each member to the next, and from the last to the first."""
    for source, destination in zip(members, [*members[1:], *members[:1]], strict=True):
        yield Flow(source, destination, share)


def _ring(group: _Group) -> Iterator[Flow]:
    if group.kind is CollectiveKind.BROADCAST:
        return _ring_broadcast(group)
    return _rings(group, _ring_share(group.kind, len(group.devices)))


def _rings(group: _Group, share: float) -> Iterator[Flow]:
    """Yields the flows of rings; the ring of channel c enters and leaves each node at its c-th rank."""
    for members in group.nodes:
        if len(members) > 1:
            yield from _cycle(members, share)
    if len(group.nodes) > 1:
        for channel in range(group.num_channels):
            yield from _cycle(group.ranks_at(channel), share / group.num_channels)


def _ring_broadcast(group: _Group) -> Iterator[Flow]:
    """Yields the flows of rings, except those into the root.

    In all rings except that of the root's own channel, the ranks between the network card and the root come last. In
    that ring, the last rank of the root's node passes the root to send over its network card, and the last rank of the
    last node has nothing to send.
    """
    root, nodes, num_channels = group.devices[0], group.nodes, group.num_channels
    at = next(index for index, members in enumerate(nodes) if root in members)
    nodes = [*nodes[at:], *nodes[:at]]
    channel = nodes[0].index(root)
    has_channel = len(nodes) > 1 and channel < num_channels
    for flow in _rings(group._replace(nodes=nodes), 1.0):
        if flow.destination == root:
            if has_channel and flow.source in nodes[0]:
                yield flow._replace(share=1 / num_channels)
        elif has_channel and flow.source in nodes[-1] and flow.destination == nodes[-1][channel]:
            yield flow._replace(share=1 - 1 / num_channels)
        else:
            yield flow


def _tree(group: _Group) -> Iterator[Flow]:
    """Yields sums up to the head of each node's chain and to the roots of the trees, and results down again."""
    num_channels = group.num_channels
    for members in group.nodes:
        for channel in range(num_channels):
            for near, far in pairwise([*members[channel:], *members[:channel]]):
                yield Flow(far, near, 1 / num_channels)
                yield Flow(near, far, 1 / num_channels)
    yield from _trees_between(group)


def _trees_between(group: _Group) -> Iterator[Flow]:
    """Yields the flows between nodes of a double binary tree per channel: half of its bytes on each edge, up and down.

    An inner node of the first tree is a leaf of the second one, which is the mirror image of the first for an even
    number of nodes, and the first shifted by one node for an odd number.
    """
    n, share = len(group.nodes), 1 / (2 * group.num_channels)
    for child in range(1, n):
        parent = tree_parent(child, n)
        mirrored = (n - 1 - child, n - 1 - parent) if n % 2 == 0 else ((child + 1) % n, (parent + 1) % n)
        for low, high in ((child, parent), mirrored):
            for channel in range(group.num_channels):
                yield Flow(group.nodes[low][channel], group.nodes[high][channel], share)
                yield Flow(group.nodes[high][channel], group.nodes[low][channel], share)


def tree_parent(node: int, num_nodes: int) -> int:
    """Returns the parent of a node in NCCL's binary tree, whose root is 0 (``ncclGetBtree``).

    The lowest set bit of a node is its height: the parent has the next higher bit set instead, if there is such a node.

    >>> [tree_parent(node, 6) for node in range(1, 6)]
    [2, 4, 2, 0, 4]
    """
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < num_nodes else node ^ bit


def _nvls(group: _Group) -> Iterator[Flow]:
    yield from _switches_inside(group)
    if len(group.nodes) > 1:
        yield from _trees_between(group)


def _switches_inside(group: _Group) -> Iterator[Flow]:
    """Yields the flows to and from the switch of each node.

    Every rank is the head of a part of the buffer; if nodes differ, as many ranks as the smallest node has are heads.
    The switch reads the part from all ranks and writes the sum to the head (reduce), and multicasts what the head has
    (gather).
    """
    reduces, gathers = group.kind is not CollectiveKind.ALL_GATHER, group.kind is not CollectiveKind.REDUCE_SCATTER
    for members in group.nodes:
        switch = group.fabric.switch_of(members, inside_node=True)
        if switch is None:  # a topology that says that the devices of a node are on PCIe, and no switch reduces there
            yield from _direct(members, reduces + gathers)
            continue
        for place, device in enumerate(members):
            part = 1 / group.num_channels if place < group.num_channels else 0.0
            yield Flow(device, switch, reduces + gathers * part)
            yield Flow(switch, device, gathers + reduces * part)


def _sharp(group: _Group) -> Iterator[Flow]:
    """Yields the flows of an all-reduce inside each node, and those of each part to and from a switch between nodes."""
    link = group.cluster.intra_link
    k = group.num_channels
    if k > 1 and link is not None and link.switch_share is not None:
        yield from _switches_inside(group)
    elif k > 1:
        for members in group.nodes:
            yield from _direct(members, 2)
    for place in range(k):
        for below, above in _reduction_tree(group.ranks_at(place), group.fabric):
            yield Flow(below, above, 1 / k)
            yield Flow(above, below, 1 / k)


def _reduction_tree(devices: Sequence[int], fabric: Fabric) -> Iterator[tuple[int, int]]:
    """Yields each edge of a tree of switches, the vertex below and the switch above it.

    Switches of every level reduce what is below them, so that an uplink has the bytes of one rank.
    """
    subtrees = [(device, [device]) for device in devices]  # root, and devices below it
    for domain_of in (*(domains for _, domains in fabric.levels[1:]), np.zeros(fabric.num_devices, dtype=np.int32)):
        by_domain: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for root, below in subtrees:
            by_domain[int(domain_of[below[0]])].append((root, below))
        subtrees = []
        for children in by_domain.values():
            together = [device for _, below in children for device in below]
            if len(children) == 1:
                subtrees.append(children[0])
                continue
            switch = fabric.switch_of(together, inside_node=False)
            assert switch is not None, "checked by simplan.rules.collectives"
            yield from ((root, switch) for root, _ in children)
            subtrees.append((switch, together))


def _direct(members: Sequence[int], times: int) -> Iterator[Flow]:
    """Yields the flows of a reduce-scatter or an all-gather by direct sends; of both for ``times`` = 2."""
    for flow in _pairwise(members):
        yield flow._replace(share=times * flow.share)


def _all_pairs(group: _Group) -> Iterator[Flow]:
    return _pairwise(group.devices)


def _pairwise(devices: Sequence[int]) -> Iterator[Flow]:
    share = 1 / len(devices)
    for source in devices:
        for destination in devices:
            if source != destination:
                yield Flow(source, destination, share)


def _once_per_node(group: _Group) -> Iterator[Flow]:
    """Yields the flows of expert dispatch that sends a token to each node once, and forwards it there."""
    draw, nodes = group.communication.draw, group.nodes
    assert draw is not None
    share = draw.places(len(nodes)) / draw.places(len(group.devices)) / len(nodes)
    for members in nodes:
        yield from _pairwise(members)
        for others in nodes:
            if others is not members:
                for place, device in enumerate(members):
                    yield Flow(device, others[place % len(others)], share)


def _hierarchical_all_to_all(group: _Group) -> Iterator[Flow]:
    """Yields the flows to the rank of the node at the place of the destination, and from there to its node."""
    for members in group.nodes:
        yield from _pairwise(members)
    for place in range(group.num_channels):
        yield from _pairwise(group.ranks_at(place))


def _hierarchical(group: _Group) -> Iterator[Flow]:
    """Yields the flows of rings inside nodes, and of rings over the ranks at the same place of all nodes."""
    k = group.num_channels
    for members in group.nodes:
        yield from _cycle(members, _ring_share(group.kind, k))
    for place in range(k):
        yield from _cycle(group.ranks_at(place), _ring_share(group.kind, len(group.nodes)) / k)


def _halving_doubling(group: _Group) -> Iterator[Flow]:
    """Yields the trades with partners at distance 1, 2, 4 ..., of a half, a fourth, an eighth ... of the buffer."""
    ranks, distance = [device for members in group.nodes for device in members], 1
    while distance < len(ranks):
        for index, device in enumerate(ranks):
            yield Flow(device, ranks[index ^ distance], LAPS[group.kind] / (2 * distance))
        distance *= 2


def _parameter_server(group: _Group) -> Iterator[Flow]:
    """Yields a ring in each node, and push and pull between all nodes and those that serve, the first ones.

    The rank at each place of a node has the sum of its part of the buffer, and trades it with the ranks at that place.
    """
    k = group.num_channels
    if k > 1:
        for members in group.nodes:
            yield from _cycle(members, _ring_share(group.kind, k))
    push = int(k > 1)
    for server, share in zip(group.nodes, group.server_shares, strict=False):
        for worker in group.nodes:
            if worker is not server:
                for place in range(k):
                    yield Flow(worker[place], server[place], share / k, push)
                    yield Flow(server[place], worker[place], share / k, push + 1)


def _hops(group: _Group) -> Iterator[Flow]:
    if group.kind is CollectiveKind.SEND:
        yield Flow(group.devices[0], group.devices[1], 1.0)
    else:
        yield from _cycle(group.devices, 1.0)


def _gloo_ring(group: _Group) -> Iterator[Flow]:
    laps = 1 if group.kind is CollectiveKind.ALL_GATHER else 2
    return _cycle(group.devices, laps * (1 - 1 / len(group.devices)))


def _binomial_tree(group: _Group) -> Iterator[Flow]:
    """Yields the sends of a broadcast, phase by phase."""
    devices = group.devices
    for number, phase in enumerate(broadcast_phases(len(devices))):
        for sender, receiver, share in phase.sends:
            yield Flow(devices[sender], devices[receiver], share, number)


def _torus(group: _Group) -> Iterator[Flow]:
    """Yields the flows along the axes of each slice, and those between ranks at the same place of several slices."""
    n = len(group.nodes)
    for members in group.nodes:
        if len(members) > 1:
            yield from _slice(group.kind, members, group.cluster)
    if n == 1:
        return
    for place in range(group.num_channels):
        if group.kind is CollectiveKind.ALL_TO_ALL:
            yield from _pairwise(group.ranks_at(place))
        else:
            yield from _cycle(group.ranks_at(place), _ring_share(group.kind, n) / group.num_channels)


def _slice(kind: CollectiveKind, members: Sequence[int], cluster: ClusterSpec) -> Iterator[Flow]:
    """Yields the flows among ranks of one slice, along its axes.

    An all-gather over a axes sends an a-th of the buffer along every axis at a time, which in the next round goes along
    the next axis together with what came before; a reduce-scatter does the reverse.
    """
    axes = _axes(members, cluster)
    sides = [len(axis.lines[0]) for axis in axes]
    for index, axis in enumerate(axes):
        gathered = 0.0
        for first in range(len(axes)):
            before = 1
            for place in range(first, first + (index - first) % len(axes)):
                before *= sides[place % len(axes)]
            gathered += before * (sides[index] - 1) / len(members) / len(axes)
        for line in axis.lines:
            yield from _line(kind, line, gathered, closes=axis.closes)


def _line(kind: CollectiveKind, line: Sequence[int], gathered: float, *, closes: bool) -> Iterator[Flow]:
    """Yields the flows along one line of a torus, in both directions.

    Args:
        gathered: Bytes that each rank receives along the line in an all-gather, over ``num_bytes``.
    """
    side = len(line)
    if closes:
        # on the shorter way round, a part goes side / 4 hops on average, or (side^2 - 1) / (4 side) for an odd side
        share = (
            (side * side - side % 2) / (8 * side) if kind is CollectiveKind.ALL_TO_ALL else LAPS[kind] * gathered / 2
        )
        yield from _cycle(line, share)
        yield from _cycle(line[::-1], share)
        return
    for ordered in (line, line[::-1]):
        for before, (source, destination) in enumerate(pairwise(ordered), 1):
            after = side - before
            match kind:
                case CollectiveKind.ALL_TO_ALL:
                    share = before * after / side
                case CollectiveKind.ALL_REDUCE:
                    share = gathered * side / (side - 1)
                case CollectiveKind.REDUCE_SCATTER:
                    share = gathered * after / (side - 1)
                case _:
                    share = gathered * before / (side - 1)
            yield Flow(source, destination, share)


def _axes(members: Sequence[int], cluster: ClusterSpec) -> list[_Axis]:
    """Returns the axes of a torus along which ranks of one slice are; one line through all for an irregular group."""
    topology, link = cluster.topology, cluster.intra_link
    assert isinstance(topology, Torus)
    assert link is not None
    shape = topology.shape
    places = np.stack(np.unravel_index(np.array(members) % math.prod(shape), shape), axis=1)
    used = [axis for axis in range(len(shape)) if len(np.unique(places[:, axis])) > 1]
    sides = [len(np.unique(places[:, axis])) for axis in used]
    if math.prod(sides) != len(members):
        return [_Axis([list(members)], closes=False)]
    grid = np.array(members).reshape(sides)  # members ascend, and so do their coordinates, last axis first
    axes = []
    for index, (axis, side) in enumerate(zip(used, sides, strict=True)):
        lines = np.moveaxis(grid, index, -1).reshape(-1, side)
        axes.append(_Axis(lines.tolist(), closes=side == shape[axis] and side >= max(3, link.torus_wrap or 1)))
    return axes


_FLOWS: Mapping[Pattern, Callable[[_Group], Iterator[Flow]]] = MappingProxyType(
    {
        Pattern.RING: _ring,
        Pattern.TREE: _tree,
        Pattern.NVLS: _nvls,
        Pattern.PAIRWISE: _all_pairs,
        Pattern.ONCE_PER_NODE: _once_per_node,
        Pattern.HOP: _hops,
        Pattern.TORUS: _torus,
        Pattern.GLOO_RING: _gloo_ring,
        Pattern.BINOMIAL_TREE: _binomial_tree,
        Pattern.HALVING_DOUBLING: _halving_doubling,
        Pattern.HIERARCHICAL: _hierarchical,
        Pattern.HIERARCHICAL_ALL_TO_ALL: _hierarchical_all_to_all,
        Pattern.SHARP: _sharp,
        Pattern.PARAMETER_SERVER: _parameter_server,
    }
)
