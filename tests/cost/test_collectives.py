"""Collectives against closed forms and an independent simulation of the ring."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.cost.base import Price
from simplan.cost.collectives import LINK_EFFICIENCY, bus_factor, message_price, ring_s, send_s
from simplan.errors import SpecError
from simplan.program.program import Message
from simplan.spec.hardware import ClusterSpec, DeviceSpec, LinkSpec
from simplan.spec.layer import CollectiveKind

GB = 10**9
INNER = LinkSpec(id="inner", bytes_per_s=400 * GB, latency_s=2e-6)
OUTER = LinkSpec(id="outer", bytes_per_s=50 * GB, latency_s=5e-6)


def cluster(num_devices: int, *, inter: LinkSpec | None = OUTER) -> ClusterSpec:
    return ClusterSpec(
        id="test",
        device=DeviceSpec(id="d"),
        devices_per_node=8,
        num_devices=num_devices,
        intra_link=INNER,
        inter_link=inter,
    )


def price(kind: CollectiveKind, num_bytes: int, ranks: tuple[int, ...]) -> Price:
    """On as many nodes of 8 as the ranks need."""
    return message_price(Message(kind, num_bytes, ranks), cluster(max(ranks) + 1))


GROUPS = st.lists(st.integers(0, 31), min_size=2, max_size=32, unique=True).map(lambda ranks: tuple(sorted(ranks)))
BYTES = st.integers(0, 10**10)


@given(st.integers(2, 9), st.integers(1, 50), st.integers(0, 5))
def test_ring_all_reduce_moves_every_chunk_round_the_ring_twice(n: int, chunk: int, latency: int) -> None:
    """Walks the algorithm: each rank adds up chunks passed round the ring, then passes the sums round."""
    num_bytes = n * chunk
    holders = {(rank, c): {rank} for rank in range(n) for c in range(n)}  # whose addends rank's chunk c contains
    time = 0.0
    for step in range(2 * (n - 1)):
        reducing = step < n - 1
        moved = []
        for rank in range(n):
            c = (rank - step) % n if reducing else (rank + 1 - (step - n + 1)) % n
            moved.append(((rank + 1) % n, c, set(holders[rank, c])))
        for target, c, addends in moved:
            holders[target, c] = holders[target, c] | addends if reducing else addends
        time += latency + chunk  # one chunk per rank at one byte a second
    assert all(addends == set(range(n)) for addends in holders.values())
    assert ring_s(2, num_bytes, n, 1.0, float(latency)) == pytest.approx(time, rel=1e-12)


def test_send_inside_and_between_nodes() -> None:
    inside = message_price(Message(CollectiveKind.SEND, 10**8, (0, 7)), cluster(16)).seconds
    between = message_price(Message(CollectiveKind.SEND, 10**8, (7, 8)), cluster(16)).seconds
    assert inside == pytest.approx(2e-6 + 1e8 / (400e9 * LINK_EFFICIENCY))
    assert between == pytest.approx(5e-6 + 1e8 / (50e9 * LINK_EFFICIENCY))
    assert send_s(100, 50, 1) == 3


def test_a_group_over_nodes_uses_the_network_of_all_its_devices() -> None:
    """Two nodes of 8: 8 x 50 GB/s, the inner link's rate; one device a node: 50 GB/s."""
    wide = message_price(Message(CollectiveKind.ALL_REDUCE, 10**9, tuple(range(16))), cluster(16)).seconds
    thin = message_price(Message(CollectiveKind.ALL_REDUCE, 10**9, (0, 8)), cluster(16)).seconds
    latency_s = 2 * 5e-6 + 2 * 7 * 2e-6
    assert wide == pytest.approx(latency_s + 2 * 15 / 16 * 1e9 / (400e9 * LINK_EFFICIENCY))
    assert thin == pytest.approx(2 * 5e-6 + 1e9 / (50e9 * LINK_EFFICIENCY))


def test_the_node_with_the_fewest_devices_sets_the_pace() -> None:
    """Twelve ranks in nodes of 8 and 4: four network ports carry the ring out of the smaller one."""
    found = message_price(Message(CollectiveKind.ALL_REDUCE, 10**9, tuple(range(12))), cluster(12)).seconds
    latency_s = 2 * 5e-6 + 2 * 3 * 2e-6
    assert found == pytest.approx(latency_s + 2 * 11 / 12 * 1e9 / (4 * 50e9 * LINK_EFFICIENCY))


def test_a_missing_link_is_named() -> None:
    with pytest.raises(SpecError, match=r"cluster\.inter_link_gbit_per_device: is needed"):
        message_price(Message(CollectiveKind.SEND, 1, (0, 8)), cluster(16, inter=None))


@pytest.mark.parametrize(
    ("kind", "latencies", "share"),
    [
        (CollectiveKind.ALL_REDUCE, 14, 2 * 7 / 8),
        (CollectiveKind.ALL_GATHER, 7, 7 / 8),
        (CollectiveKind.REDUCE_SCATTER, 7, 7 / 8),
        (CollectiveKind.ALL_TO_ALL, 7, 7 / 8),
        (CollectiveKind.BROADCAST, 7, 1),
        (CollectiveKind.RING, 1, 1),
    ],
)
def test_closed_forms_inside_a_node(kind: CollectiveKind, latencies: int, share: float) -> None:
    found = price(kind, 8 * 10**8, tuple(range(8))).seconds
    assert found == pytest.approx(latencies * 2e-6 + share * 8e8 / (400e9 * LINK_EFFICIENCY), rel=1e-12)
    assert bus_factor(kind, 8) == pytest.approx(share)


@given(st.integers(2, 9), st.integers(1, 50))
def test_bus_factors_are_what_each_rank_sends(n: int, chunk: int) -> None:
    """Counts chunks: a ring hands on n-1 of them, a pairwise exchange keeps its own."""
    gathered = {rank: {rank} for rank in range(n)}
    sent = 0
    while any(len(chunks) < n for chunks in gathered.values()):
        passed = {(rank + 1) % n: (rank - sent) % n for rank in range(n)}
        assert all(c in gathered[(rank - 1) % n] for rank, c in passed.items())
        for rank, c in passed.items():
            gathered[rank].add(c)
        sent += 1
    num_bytes = n * chunk
    assert bus_factor(CollectiveKind.ALL_GATHER, n) * num_bytes == pytest.approx(sent * chunk)
    kept = chunk
    assert bus_factor(CollectiveKind.ALL_TO_ALL, n) * num_bytes == pytest.approx(num_bytes - kept)


@given(GROUPS, BYTES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: tuple[int, ...], num_bytes: int) -> None:
    parts = (price(kind, num_bytes, ranks) for kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER))
    whole = price(CollectiveKind.ALL_REDUCE, num_bytes, ranks).seconds
    assert whole == pytest.approx(sum(part.seconds for part in parts), rel=1e-12)


@given(st.sampled_from(CollectiveKind), GROUPS, BYTES, BYTES)
def test_more_bytes_take_no_less(kind: CollectiveKind, ranks: tuple[int, ...], one: int, other: int) -> None:
    ranks = ranks[:2] if kind is CollectiveKind.SEND else ranks
    low, high = (price(kind, num_bytes, ranks).seconds for num_bytes in sorted((one, other)))
    assert 0 <= low <= high


@given(st.sampled_from([kind for kind in CollectiveKind if kind is not CollectiveKind.SEND]), BYTES)
def test_more_ranks_of_a_node_take_no_less(kind: CollectiveKind, num_bytes: int) -> None:
    times_s = [price(kind, num_bytes, tuple(range(n))).seconds for n in range(1, 9)]
    assert times_s[0] == 0.0  # a group of one
    assert times_s == sorted(times_s)


def test_an_all_to_all_over_nodes_waits_for_what_leaves_them() -> None:
    """Two nodes of 8: half of each buffer leaves over the device's own 50 GB/s."""
    found = price(CollectiveKind.ALL_TO_ALL, 16 * 10**8, tuple(range(16))).seconds
    assert found == pytest.approx(8 * (5e-6 + 1e8 / (50e9 * LINK_EFFICIENCY)))


def test_an_all_to_all_of_uneven_nodes_waits_for_the_smaller_node() -> None:
    """Nodes of 8 and 4: from the smaller one, 8 parts of 12 leave."""
    found = price(CollectiveKind.ALL_TO_ALL, 12 * 10**8, tuple(range(12))).seconds
    assert found == pytest.approx(8 * (5e-6 + 1e8 / (50e9 * LINK_EFFICIENCY)))


def test_an_all_to_all_over_nodes_may_wait_for_what_stays_inside() -> None:
    """The same with links changed about: seven parts of 16 go over the slower link inside the node."""
    slow_inside = cluster(16, inter=INNER).model_copy(update={"intra_link": OUTER})
    found = message_price(Message(CollectiveKind.ALL_TO_ALL, 16 * 10**8, tuple(range(16))), slow_inside).seconds
    assert found == pytest.approx(7 * (5e-6 + 1e8 / (50e9 * LINK_EFFICIENCY)))


def test_a_ring_that_crosses_nodes_is_as_slow_as_that_hop() -> None:
    """Neighbours of different nodes have one device's network, however many devices the nodes have."""
    found = price(CollectiveKind.RING, 10**8, tuple(range(16))).seconds
    assert found == pytest.approx(5e-6 + 1e8 / (50e9 * LINK_EFFICIENCY))


@given(st.sampled_from(CollectiveKind), GROUPS, st.integers(1, 10**10))
def test_formulas_come_to_the_price(kind: CollectiveKind, ranks: tuple[int, ...], num_bytes: int) -> None:
    """Worked out with a calculator, as far as the printed digits go."""
    found = price(kind, num_bytes, ranks[:2] if kind is CollectiveKind.SEND else ranks)
    units = {"us": 1e-6, "ms": 1e-3, "s": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    units |= {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6}
    text = found.formula.rpartition(" (")[0].replace("2 (", "2 * (").replace(" x ", " * ")
    text = re.sub(r"([0-9.]+) ([KMGTBus][a-zA-Z/]*)", lambda match: f"({match[1]} * {units[match[2]]})", text)
    assert eval(text) == pytest.approx(found.seconds, rel=0.05, abs=1e-8)
