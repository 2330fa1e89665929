"""Collectives against closed forms and an independent simulation of the ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.cost.collectives import LINK_EFFICIENCY, message_price, ring_all_reduce_s, send_s
from simplan.errors import SpecError
from simplan.program.program import Message
from simplan.spec.hardware import ClusterSpec, DeviceSpec, LinkSpec

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
    assert ring_all_reduce_s(num_bytes, n, 1.0, float(latency)) == pytest.approx(time, rel=1e-12)


def test_send_inside_and_between_nodes() -> None:
    inside = message_price(Message("send", 10**8, (0, 7)), cluster(16)).seconds
    between = message_price(Message("send", 10**8, (7, 8)), cluster(16)).seconds
    assert inside == pytest.approx(2e-6 + 1e8 / (400e9 * LINK_EFFICIENCY))
    assert between == pytest.approx(5e-6 + 1e8 / (50e9 * LINK_EFFICIENCY))
    assert send_s(100, 50, 1) == 3


def test_a_group_over_nodes_uses_the_network_of_all_its_devices() -> None:
    """Two nodes of 8: 8 x 50 GB/s, the inner link's rate; one device a node: 50 GB/s."""
    wide = message_price(Message("all_reduce", 10**9, tuple(range(16))), cluster(16)).seconds
    thin = message_price(Message("all_reduce", 10**9, (0, 8)), cluster(16)).seconds
    latency_s = 2 * 5e-6 + 2 * 7 * 2e-6
    assert wide == pytest.approx(latency_s + 2 * 15 / 16 * 1e9 / (400e9 * LINK_EFFICIENCY))
    assert thin == pytest.approx(2 * 5e-6 + 1e9 / (50e9 * LINK_EFFICIENCY))


def test_the_node_with_the_fewest_devices_sets_the_pace() -> None:
    """Twelve ranks in nodes of 8 and 4: four network ports carry the ring out of the smaller one."""
    found = message_price(Message("all_reduce", 10**9, tuple(range(12))), cluster(12)).seconds
    latency_s = 2 * 5e-6 + 2 * 3 * 2e-6
    assert found == pytest.approx(latency_s + 2 * 11 / 12 * 1e9 / (4 * 50e9 * LINK_EFFICIENCY))


def test_a_missing_link_is_named() -> None:
    with pytest.raises(SpecError, match=r"cluster\.inter_link_gbit_per_device: is needed"):
        message_price(Message("send", 1, (0, 8)), cluster(16, inter=None))
