"""Algorithms walked round by round: ranks end with what the collective says, and send the bytes of the flows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.communication.algorithm import CommAlgorithm, Pattern
from simplan.model.layer import CollectiveKind
from simplan.network.build import fabric_of
from simplan.network.flows import flows_of, tree_parent
from simplan.program.program import Communication
from tests.network.clusters import HOSTS, NODES, group, torus

Sent = defaultdict[tuple[int, int], Fraction]
ALL_REDUCE, ALL_GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
REDUCE_SCATTER, ALL_TO_ALL = CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda shape: shape != (1, 1))
POWERS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])).filter(lambda shape: shape != (1, 1))


def nothing() -> Sent:
    """Bytes sent between pairs of ranks, as parts of the buffer: none yet."""
    return defaultdict(Fraction)


def check_flows(
    sent: Sent,
    pattern: Pattern,
    kind: CollectiveKind,
    ranks: Sequence[int],
    cluster: ClusterSpec,
    server_shares: tuple[float, ...] = (),
) -> None:
    """Asserts that the flows of an algorithm are the bytes sent between each pair of ranks, as parts of the buffer."""
    way = CommAlgorithm("", 0.0, (), (), pattern, server_shares=server_shares)
    flows = flows_of(way, Communication(kind, 1, tuple(ranks)), ranks, cluster, fabric_of(cluster))
    shares: defaultdict[tuple[int, int], float] = defaultdict(float)
    for source, destination, share, _ in flows.each():
        shares[source, destination] += share
    assert shares == pytest.approx({pair: float(part) for pair, part in sent.items() if part}, rel=1e-9)


def ring_orders(num_nodes: int, num_local: int) -> list[list[int]]:
    """Ranks in the order of each channel's ring, which enters a node at the rank with the channel's number."""
    return [
        [8 * node + (channel + step) % num_local for node in range(num_nodes) for step in range(num_local)]
        for channel in range(num_local)
    ]


def hop(sent: Sent, source: int, destination: int, part: Fraction, card: int) -> None:
    """Counts a send; one to another node goes by way of the rank whose network card the ring uses."""
    if source // 8 != destination // 8:
        here = source // 8 * 8 + card
        if source != here:
            sent[source, here] += part
        source = here
    sent[source, destination] += part


@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER])
@given(shape=SHAPES)
def test_rings_by_channel(kind: CollectiveKind, shape: tuple[int, int]) -> None:
    ranks, sent = group(*shape), nothing()
    n = len(ranks)
    for channel, order in enumerate(ring_orders(*shape)):
        part = Fraction(1, n * shape[1])
        sums = {(rank, chunk): {rank} for rank in ranks for chunk in range(n)}  # addends of each rank's chunk
        if kind is ALL_GATHER:
            sums = {(rank, at): set(ranks) if order[at] == rank else set() for rank in ranks for at in range(n)}
        rounds = [(True, step) for step in range(n - 1)] if kind is not ALL_GATHER else []
        if kind is not REDUCE_SCATTER:
            rounds += [(False, step) for step in range(n - 1)]
        for reduces, step in rounds:
            moved = []
            for place, rank in enumerate(order):
                first = place if kind is ALL_GATHER else place + 1
                chunk = (place - step if reduces else first - step) % n
                moved.append((rank, order[(place + 1) % n], chunk, set(sums[rank, chunk])))
            for source, destination, chunk, addends in moved:
                hop(sent, source, destination, part, channel)
                sums[destination, chunk] = sums[destination, chunk] | addends if reduces else addends
        complete = {(rank, chunk) for (rank, chunk), addends in sums.items() if addends == set(ranks)}
        if kind is REDUCE_SCATTER:
            assert {(order[place], (place + 1) % n) for place in range(n)} <= complete
        else:
            assert len(complete) == n * n
    check_flows(sent, Pattern.RING, kind, ranks, NODES)


@given(SHAPES, st.data())
def test_rings_of_a_broadcast(shape: tuple[int, int], data: st.DataObject) -> None:
    ranks, sent = group(*shape), nothing()
    root = data.draw(st.sampled_from(ranks))
    for channel, order in enumerate(ring_orders(*shape)):
        place, have = order.index(root), {root}
        for step in range(len(order) - 1):
            source, destination = order[(place + step) % len(order)], order[(place + step + 1) % len(order)]
            assert source in have
            hop(sent, source, destination, Fraction(1, shape[1]), channel)
            have.add(destination)
        assert have == set(ranks)
    members = (root, *(rank for rank in ranks if rank != root))
    check_flows(sent, Pattern.RING, CollectiveKind.BROADCAST, members, NODES)


@given(st.integers(2, 64))
def test_every_node_is_inner_in_one_tree_at_most(num_nodes: int) -> None:
    """Sanders, Speck and Traff 2009: so each node sends half of the buffer to at most four neighbors in all."""
    parents = {child: tree_parent(child, num_nodes) for child in range(1, num_nodes)}
    degrees = Counter[int](parents.values())
    assert max(degrees.values()) <= 2
    for leaf in parents:
        node, depth = leaf, 0
        while node:
            node, depth = parents[node], depth + 1
        assert depth <= (num_nodes - 1).bit_length()
    inner = set(parents.values()) - {0}
    if num_nodes % 2 == 0:
        assert inner.isdisjoint({num_nodes - 1 - node for node in inner})
    else:
        assert inner.isdisjoint({(node + 1) % num_nodes for node in inner})


@given(SHAPES)
def test_double_binary_trees(shape: tuple[int, int]) -> None:
    (num_nodes, num_local), sent = shape, nothing()
    ranks = group(*shape)
    for order in ring_orders(*shape):
        chains = [order[node * num_local :][:num_local] for node in range(num_nodes)]
        for shift in (0, 1):
            names = list(range(num_nodes))  # of the nodes of the second tree, in those of the first
            if shift:
                names = names[::-1] if num_nodes % 2 == 0 else [(node + 1) % num_nodes for node in names]
            part, sums = Fraction(1, 2 * num_local), {rank: {rank} for rank in ranks}
            edges = [(far, near) for chain in chains for near, far in reversed([*pairwise(chain)])]
            edges += [
                (chains[names[child]][0], chains[names[tree_parent(child, num_nodes)]][0])
                for child in sorted(range(1, num_nodes), key=lambda node: node & -node)  # leaves first
            ]
            for below, above in edges:
                sums[above] |= sums[below]
                sent[below, above] += part
            for below, above in reversed(edges):
                sums[below] = sums[above]
                sent[above, below] += part
            assert all(addends == set(ranks) for addends in sums.values())
    check_flows(sent, Pattern.TREE, ALL_REDUCE, ranks, NODES)


@given(POWERS)
def test_halving_and_doubling(shape: tuple[int, int]) -> None:
    ranks, sent = group(*shape), nothing()
    n = len(ranks)
    sums = {(index, chunk): {index} for index in range(n) for chunk in range(n)}
    mine = {index: set(range(n)) for index in range(n)}  # chunks that a rank still reduces
    distances = [1 << bit for bit in range((n - 1).bit_length())]
    for distance in distances:
        moved = []
        for index in range(n):
            partner = index ^ distance
            given_away = {chunk for chunk in mine[index] if chunk & distance == partner & distance}
            sent[ranks[index], ranks[partner]] += Fraction(len(given_away), n)
            moved += [(partner, chunk, set(sums[index, chunk])) for chunk in given_away]
        for index in range(n):
            mine[index] = {chunk for chunk in mine[index] if chunk & distance == index & distance}
        for index, chunk, addends in moved:
            sums[index, chunk] |= addends
    assert all(mine[index] == {index} and sums[index, index] == set(range(n)) for index in range(n))
    check_flows(sent, Pattern.HALVING_DOUBLING, REDUCE_SCATTER, ranks, NODES)
    for distance in reversed(distances):
        before = {index: set(chunks) for index, chunks in mine.items()}
        for index in range(n):
            sent[ranks[index ^ distance], ranks[index]] += Fraction(len(before[index ^ distance]), n)
            mine[index] |= before[index ^ distance]
    assert all(chunks == set(range(n)) for chunks in mine.values())
    check_flows(sent, Pattern.HALVING_DOUBLING, ALL_REDUCE, ranks, NODES)


@given(st.tuples(st.integers(2, 4), st.integers(2, 4)))
def test_hierarchical_all_to_all(shape: tuple[int, int]) -> None:
    (num_nodes, num_local), sent, ranks = shape, nothing(), group(*shape)
    n = len(ranks)
    held = {rank: {(rank, destination) for destination in ranks} for rank in ranks}

    def trade(next_of: dict[tuple[int, int], int]) -> None:
        moved = [(rank, item, next_of[rank, item[1]]) for rank in ranks for item in held[rank]]
        for rank, item, there in moved:
            if there != rank:
                sent[rank, there] += Fraction(1, n)
                held[rank].remove(item)
                held[there].add(item)

    trade({(rank, to): rank // 8 * 8 + to % 8 for rank in ranks for to in ranks})  # to the place of the destination
    messages = {(rank, item[1]) for rank in ranks for item in held[rank] if item[1] != rank}
    assert len(messages) == n * (num_nodes - 1)  # one for each node pair and place
    trade({(rank, to): to for rank in ranks for to in ranks})
    assert all(held[rank] == {(source, rank) for source in ranks} for rank in ranks)
    assert num_local > 1
    check_flows(sent, Pattern.HIERARCHICAL_ALL_TO_ALL, ALL_TO_ALL, ranks, NODES)


@given(SHAPES, st.data())
def test_parameter_servers(shape: tuple[int, int], data: st.DataObject) -> None:
    """A ring adds each part of the buffer in the node, servers add their bytes of all nodes, and the ring gathers."""
    (num_nodes, k), sent = shape, nothing()
    weights = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=num_nodes).filter(any))
    served = [Fraction(weight, sum(weights)) for weight in weights]
    addends = {(rank, part): {rank} for rank in group(*shape) for part in range(k)}

    def ring(step: int, first: int, *, adds: bool) -> None:
        for node in range(num_nodes):
            moved = [(place, (place + first - step) % k) for place in range(k)]
            parts = {chunk: set(addends[8 * node + place, chunk]) for place, chunk in moved}
            for place, chunk in moved:
                here, there = 8 * node + place, 8 * node + (place + 1) % k
                sent[here, there] += Fraction(1, k)
                addends[there, chunk] = addends[there, chunk] | parts[chunk] if adds else parts[chunk]

    for step in range(k - 1):
        ring(step, -1, adds=True)  # so that the rank at a place ends with the sum of the part of that number
    for place in range(k):
        sums = [addends[8 * node + place, place] for node in range(num_nodes)]
        assert sums == [{8 * node + other for other in range(k)} for node in range(num_nodes)]
        for server, part in enumerate(served):
            for node in range(num_nodes):
                if node != server:
                    sent[8 * node + place, 8 * server + place] += part / k  # push
                    sent[8 * server + place, 8 * node + place] += part / k  # pull
        for node in range(num_nodes):
            addends[8 * node + place, place] = set().union(*sums)
    for step in range(k - 1):
        ring(step, 0, adds=False)
    assert all(members == set(group(*shape)) for members in addends.values())
    check_flows(sent, Pattern.PARAMETER_SERVER, ALL_REDUCE, group(*shape), NODES, tuple(map(float, served)))


@given(st.integers(2, 32))
def test_binomial_tree_of_gloo(n: int) -> None:
    have, sent, rounds = {0}, nothing(), 0
    while len(have) < n:
        for rank in sorted(have):
            if rank + (1 << rounds) < n:
                sent[rank, rank + (1 << rounds)] += 1
                have.add(rank + (1 << rounds))
        rounds += 1
    assert rounds == (n - 1).bit_length()
    check_flows(sent, Pattern.BINOMIAL_TREE, CollectiveKind.BROADCAST, range(n), HOSTS)


@pytest.mark.parametrize("shape", [(4,), (4, 4), (4, 8), (4, 4, 8)])
def test_all_gather_on_a_torus(shape: tuple[int, ...]) -> None:
    """A part of the buffer for each axis, which goes along that axis first, and half of it in each direction."""
    cluster, axes = torus("ici-tpu-v4", shape), len(shape)
    n, sent = cluster.num_devices, nothing()
    strides = [1]
    for side in reversed(shape[1:]):
        strides.insert(0, strides[0] * side)

    def neighbor(rank: int, axis: int, direction: int) -> int:
        place = rank // strides[axis] % shape[axis]
        return rank + ((place + direction) % shape[axis] - place) * strides[axis]

    for part in range(axes):
        for direction in (1, -1):
            have = {rank: {rank} for rank in range(n)}
            for axis in ((part + step) % axes for step in range(axes)):
                passing = {rank: set(have[rank]) for rank in range(n)}
                for _ in range(shape[axis] - 1):
                    arriving = {neighbor(rank, axis, direction): chunks for rank, chunks in passing.items()}
                    for rank, chunks in passing.items():
                        sent[rank, neighbor(rank, axis, direction)] += Fraction(len(chunks), 2 * axes * n)
                    for rank, chunks in arriving.items():
                        have[rank] |= chunks
                    passing = arriving
            assert all(len(chunks) == n for chunks in have.values())
    check_flows(sent, Pattern.TORUS, ALL_GATHER, range(n), cluster)


@pytest.mark.parametrize("side", [4, 5, 6])
def test_all_to_all_on_a_ring_of_a_torus(side: int) -> None:
    """On the shorter way round; of two of the same length, half of the bytes each way."""
    sent = nothing()
    for source in range(side):
        for distance in range(1, side):
            ways = [(distance, 1)] * (2 * distance <= side) + [(side - distance, -1)] * (2 * distance >= side)
            for hops, direction in ways:
                for step in range(hops):
                    here, there = (source + step * direction) % side, (source + (step + 1) * direction) % side
                    sent[here, there] += Fraction(1, side * len(ways))
    check_flows(sent, Pattern.TORUS, ALL_TO_ALL, range(side), torus("ici-tpu-v4", (side,)))
