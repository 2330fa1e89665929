"""Collectives against closed forms, walks of the algorithms, and published bandwidths."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, DeviceSpec, LinkSpec, Spread
from simplan.cost.communication.collectives import bus_factor, communication_cost
from simplan.cost.communication.nccl import nccl_ways
from simplan.cost.communication.route import route_of
from simplan.cost.model import CostEstimate, Provenance
from simplan.errors import SpecError
from simplan.model.layer import CollectiveKind, ExpertDraw
from simplan.program.program import Communication
from simplan.units import GIB, MIB
from tests.cost.formulas import value_of

GB = 10**9
US = 1e-6
INNER = LinkSpec(id="inner", bytes_per_s=400 * GB, latency_s=2 * US, bandwidth_share=0.8, launch_s=10 * US)
OUTER = LinkSpec(id="outer", bytes_per_s=50 * GB, latency_s=20 * US, bandwidth_share=0.9, launch_s=10 * US)
SWITCH = INNER.model_copy(update={"id": "switch", "switch_share": 0.7})
GLOO = LinkSpec(id="loop", bytes_per_s=GB, latency_s=1e-4, bandwidth_share=0.5, library="gloo")
SIMPLE_S = (10 + 8.4) * US  # launch, and what NCCL's table says of a ring with protocol Simple


def cluster(num_devices: int, *, intra: LinkSpec = INNER, inter: LinkSpec | None = OUTER) -> ClusterSpec:
    return ClusterSpec(
        id="test",
        device=DeviceSpec(id="d"),
        devices_per_node=8,
        num_devices=num_devices,
        intra_link=intra,
        inter_link=inter,
    )


def of_chips(device: str, number: int, *, chips: int, network: LinkSpec | None = None) -> ClusterSpec:
    """Slices of so many TPU chips each."""
    link = catalog.link(f"ici-{device}")
    return catalog.make_cluster(catalog.NodeEntry("slice", catalog.device(device), chips, link, network), number)


def all_reduce(ranks: tuple[int, ...], num_bytes: int) -> Communication:
    return Communication(CollectiveKind.ALL_REDUCE, num_bytes, ranks)


def cost_estimate(
    kind: CollectiveKind, num_bytes: int, ranks: tuple[int, ...], intra: LinkSpec = INNER
) -> CostEstimate:
    """On as many nodes of 8 as the ranks need."""
    return communication_cost(Communication(kind, num_bytes, ranks), cluster(max(ranks) + 1, intra=intra))


def published(preset: str, kind: CollectiveKind, num_bytes: int, ranks: range, num_devices: int = 8) -> CostEstimate:
    return communication_cost(Communication(kind, num_bytes, tuple(ranks)), catalog.cluster(preset, num_devices))


GROUPS = st.lists(st.integers(0, 31), min_size=2, max_size=32, unique=True).map(lambda ranks: tuple(sorted(ranks)))
BYTES = st.integers(0, 10**10)


@given(st.integers(2, 8), st.integers(1, 50))
def test_ring_all_reduce_moves_every_chunk_round_the_ring_twice(n: int, chunk: int) -> None:
    """Walks the algorithm: each rank adds up chunks passed round the ring, then passes the sums round."""
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
        time += 1e-4 + chunk / (0.5 * GB)  # one chunk per rank
    assert all(addends == set(range(n)) for addends in holders.values())
    assert cost_estimate(CollectiveKind.ALL_REDUCE, n * chunk, tuple(range(n)), GLOO).seconds == pytest.approx(
        time, rel=1e-12
    )


def test_send_inside_and_between_nodes() -> None:
    inside = cost_estimate(CollectiveKind.SEND, 10**8, (0, 7)).seconds
    between = cost_estimate(CollectiveKind.SEND, 10**8, (7, 8)).seconds
    assert inside == pytest.approx(SIMPLE_S + 2 * US + 1e8 / 320e9)
    assert between == pytest.approx(SIMPLE_S + 20 * US + 1e8 / 45e9)
    small = cost_estimate(CollectiveKind.SEND, 1000, (0, 7)).seconds
    assert small == pytest.approx((10 + 6.6 + 0.18 * 2) * US + 1000 / (0.39 * 320e9))


def test_a_group_over_nodes_uses_the_network_of_all_its_devices() -> None:
    """Two nodes of 8: 8 x 45 GB/s is more than a device reaches inside, 320 GB/s; one device a node: 45 GB/s."""
    wide = cost_estimate(CollectiveKind.ALL_REDUCE, 10**9, tuple(range(16))).seconds
    thin = cost_estimate(CollectiveKind.ALL_REDUCE, 10**9, (0, 8)).seconds
    # a step inside takes the 3 us in which a communication outside is posted
    assert wide == pytest.approx(SIMPLE_S + 2 * 20 * US + 28 * 3 * US + 2 * 15 / 16 * 1e9 / 320e9)
    assert thin == pytest.approx(SIMPLE_S + 2 * 20 * US + 1e9 / 45e9)
    small = cost_estimate(CollectiveKind.ALL_GATHER, 1000, (0, 8)).seconds  # LL; one device a node hides no latency
    assert small == pytest.approx((10 + 6.6 + 0.36 * 20) * US + 500 / (0.11 * 45e9))


@pytest.mark.parametrize(
    ("kind", "num_bytes", "ranks", "seconds"),
    [
        # two of 8 devices in each of two nodes gather over the network of two, whatever the other six do
        (CollectiveKind.ALL_GATHER, 10**9, (0, 1, 8, 9), (20 + 2 * 3) * US + 3 / 4 * 1e9 / 90e9),
        # half of each buffer leaves over the device's own 45 GB/s; seven more communications are posted
        (CollectiveKind.ALL_TO_ALL, 16 * 10**8, tuple(range(16)), (20 + 7 * 3) * US + 8 * 1e8 / 45e9),
        # nodes of 8 and 4: from the smaller one, 8 parts of 12 leave
        (CollectiveKind.ALL_TO_ALL, 12 * 10**8, tuple(range(12)), (20 + 7 * 3) * US + 8 * 1e8 / 45e9),
        # neighbours of different nodes have one device's network, however many devices the nodes have
        (CollectiveKind.RING, 10**8, tuple(range(16)), 20 * US + 1e8 / 45e9),
    ],
)
def test_closed_forms_between_nodes(
    kind: CollectiveKind, num_bytes: int, ranks: tuple[int, ...], seconds: float
) -> None:
    assert cost_estimate(kind, num_bytes, ranks).seconds == pytest.approx(SIMPLE_S + seconds)


def test_the_node_with_the_fewest_devices_sets_the_pace() -> None:
    """Twelve ranks in nodes of 8 and 4: a tree sends the buffer once over four devices' network, 180 GB/s."""
    estimate = cost_estimate(CollectiveKind.ALL_REDUCE, 10**9, tuple(range(12)))
    assert "tree Simple" in estimate.formula
    assert estimate.seconds == pytest.approx(SIMPLE_S + 2 * 20 * US + 6 * 1.18 * 2 * US + 1e9 / (0.8 * 180e9))
    gathered = cost_estimate(CollectiveKind.ALL_GATHER, 10**9, tuple(range(12))).seconds
    assert gathered == pytest.approx(SIMPLE_S + 20 * US + 10 * 3 * US + 11 / 12 * 1e9 / 180e9)


@pytest.mark.parametrize("number", [9, 12, 16, 20, 24, 36])
def test_words_on_nodes_add_up_to_all_ranks(number: int) -> None:
    """Nodes of 8 devices, the last of which may have fewer: words of the cluster, and of every formula."""
    last = number % 8
    words = cluster(number).nodes_in_words
    sizes = re.findall(r"of (?:(\d+) x )?8 \+ (\d+) devices", words)
    assert words.startswith(f"{-(-number // 8)} nodes")
    assert [int(full or 1) * 8 + int(rest) for full, rest in sizes] == ([number] if last else [])
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL):
        communication = Communication(kind, number * 10**8, tuple(range(number)))
        formula = communication_cost(communication, cluster(number)).formula
        even = {int(nodes) * int(ranks) for nodes, ranks in re.findall(r"(\d+) nodes x (\d+),", formula)}
        assert even == (set() if last else {number})
        assert (f"{number} ranks on {-(-number // 8)} nodes, {last} on the smallest," in formula) == bool(last)


def test_over_more_than_two_nodes_a_tree_sends_the_buffer_twice() -> None:
    """An inner node of one tree is a leaf of the other: half a buffer to two parents and to two children each."""
    slow = OUTER.model_copy(update={"bytes_per_s": 5e9})
    estimate = communication_cost(
        Communication(CollectiveKind.ALL_REDUCE, 10**9, tuple(range(64))), cluster(64, inter=slow)
    )
    nodes, shared = 8, 8 * 4.5e9
    ring_s = 2 * 63 / 64 * 1e9 / shared  # less than the tree's bytes take, but 14 steps between nodes and 112 inside
    tree_s = 2e9 / (0.92 * shared)
    assert estimate.seconds == pytest.approx(SIMPLE_S + 2 * (nodes - 1) * 20 * US + 112 * 3 * US + ring_s)
    assert ring_s < tree_s
    small = communication_cost(
        Communication(CollectiveKind.ALL_REDUCE, 10**6, tuple(range(64))), cluster(64, inter=slow)
    )
    # 3 levels up and down, LL128
    steps = (10 + 14 + 6 * 0.61 * 20 + 14 * 0.37 * 2) * US
    assert small.seconds == pytest.approx(steps + 2e6 / (0.92 * 0.8 * shared))


def test_a_missing_link_is_named() -> None:
    with pytest.raises(SpecError, match=r"cluster\.inter_link_gbit_per_device: is needed"):
        communication_cost(Communication(CollectiveKind.SEND, 1, (0, 8)), cluster(16, inter=None))


@pytest.mark.parametrize(
    ("kind", "steps_us", "share"),
    [
        (CollectiveKind.ALL_REDUCE, 14 * 2, 2 * 7 / 8),
        (CollectiveKind.ALL_GATHER, 7 * 2, 7 / 8),
        (CollectiveKind.REDUCE_SCATTER, 7 * 2, 7 / 8),
        (CollectiveKind.ALL_TO_ALL, 2 + 6 * 3, 7 / 8),
        (CollectiveKind.BROADCAST, 7 * 2, 1),
        (CollectiveKind.RING, 2, 1),
    ],
)
def test_closed_forms_inside_a_node(kind: CollectiveKind, steps_us: int, share: float) -> None:
    estimated_s = cost_estimate(kind, 8 * 10**8, tuple(range(8))).seconds
    assert estimated_s == pytest.approx(SIMPLE_S + steps_us * US + share * 8e8 / 320e9, rel=1e-12)
    assert bus_factor(kind, 8) == pytest.approx(share)


def test_the_switch_reduces() -> None:
    """Counts what a device's port sends and receives: its buffer is read and a part of the sum written to it, then it
    sends its part once and receives all of them."""
    n, num_bytes = 8, 8 * 10**8
    part = num_bytes // n
    sent = [num_bytes + part for _ in range(n)]
    received = [part + sum(part for _ in range(n)) for _ in range(n)]
    assert sent == received
    estimated_s = cost_estimate(CollectiveKind.ALL_REDUCE, num_bytes, tuple(range(n)), SWITCH).seconds
    assert estimated_s == pytest.approx(10 * US + 7.35 * 2 * US + sent[0] / 280e9)
    gathered = cost_estimate(CollectiveKind.ALL_GATHER, num_bytes, tuple(range(n)), SWITCH).formula
    assert "ring" in gathered  # no gain in what every device has to receive


@pytest.mark.parametrize(
    ("num_nodes", "num_bytes", "in_flight"),
    [(2, 4, 4), (2, 32, 8), (2, 64, 16), (2, 1024, 16), (4, 4, 4), (4, 32, 8), (4, 1024, 8)],
)
def test_an_nvls_tree_fills_with_chunks_of_nccl_sizes(num_nodes: int, num_bytes: int, in_flight: int) -> None:
    """128 channels and heads of 32, 64 or 128 KiB each, twice over the switch; the rest is steps and one transfer."""
    ranks = tuple(range(8 * num_nodes))
    route = route_of(ranks, cluster(len(ranks), intra=SWITCH))
    [way] = [way for way in nccl_ways(all_reduce(ranks, MIB), route) if way.name == "NVLS tree"]
    rate, (number, step_s), (inside, inside_s) = 400 * GB * 0.7, *way.steps
    rest_s = 10 * US + number * step_s + inside * inside_s + way.transfer_s(num_bytes * MIB)
    assert way.seconds(num_bytes * MIB) - rest_s == pytest.approx(2 * in_flight * MIB / rate)
    assert value_of(way.part(num_bytes * MIB, "").formula) == pytest.approx(way.seconds(num_bytes * MIB), rel=1e-3)


def test_bus_bandwidths_that_nccl_tests_prints() -> None:
    """H200, 8 GiB: 365 GB/s round the ring, 473 GB/s with the switch; 8 A100: 235; 16 H100 in two nodes: 464 to 479."""

    def bus(preset: str, kind: CollectiveKind, n: int, num_devices: int = 8) -> float:
        estimate = published(preset, kind, 8 * GIB, range(n), num_devices)
        assert estimate.provenance is Provenance.PUBLISHED
        return bus_factor(kind, n) * 8 * GIB / estimate.seconds / GB

    assert bus("dgx-h200", CollectiveKind.ALL_GATHER, 8) == pytest.approx(365, rel=0.03)
    assert bus("dgx-h200", CollectiveKind.ALL_REDUCE, 8) == pytest.approx(473, rel=0.06)
    assert bus("dgx-a100-80gb", CollectiveKind.ALL_REDUCE, 8) == pytest.approx(235, rel=0.1)
    assert bus("dgx-h100", CollectiveKind.ALL_REDUCE, 16, 16) == pytest.approx(470, rel=0.06)


def test_devices_wired_to_each_other_use_some_of_their_links() -> None:
    """MI300X: one of seven links between two devices, all of them among eight (47.7 and 313 GB/s, published)."""
    link = catalog.link("xgmi")
    node = catalog.NodeEntry("mi300x", catalog.device("mi300x"), 8, link, None)

    def rate(n: int, kind: CollectiveKind) -> float:
        communication = Communication(kind, 4 * GIB, tuple(range(n)))
        return (
            bus_factor(kind, n)
            * 4
            * GIB
            / communication_cost(communication, catalog.make_cluster(node, 8)).seconds
            / GB
        )

    assert rate(2, CollectiveKind.ALL_REDUCE) == pytest.approx(47.7, rel=0.05)
    assert rate(8, CollectiveKind.ALL_REDUCE) == pytest.approx(313, rel=0.1)
    assert rate(2, CollectiveKind.SEND) == pytest.approx(link.bandwidth_share * 64, rel=0.01)
    assert rate(8, CollectiveKind.RING) == pytest.approx(link.bandwidth_share * 64, rel=0.01)


def test_a_rack_that_is_one_domain_has_no_network() -> None:
    """64 of the 72 devices of an NVL72 are one node; 4 nodes of 16 would cross a network."""
    estimate = published("gb200-nvl72", CollectiveKind.ALL_GATHER, GIB, range(64), 72)
    assert "nvlink5" in estimate.formula
    assert "nodes" not in estimate.formula


@pytest.mark.parametrize(
    ("device", "num_chips", "n", "links"),
    [
        ("tpu-v5p", 64, 64, 6),  # a cube of 4: three axes, each a ring
        ("tpu-v5p", 64, 4, 2),  # one of them
        ("tpu-v5e", 256, 256, 4),  # 16 x 16
        ("tpu-v5e", 16, 4, 1),  # 4 x 4: axes do not close
    ],
)
def test_a_torus_has_two_links_on_every_axis(device: str, num_chips: int, n: int, links: int) -> None:
    slice_ = of_chips(device, num_chips, chips=num_chips)
    estimated_s = communication_cost(Communication(CollectiveKind.ALL_GATHER, 10**10, tuple(range(n))), slice_).seconds
    rate = links * catalog.link(f"ici-{device}").bytes_per_s * 0.82
    assert estimated_s == pytest.approx((n - 1) / n * 1e10 / rate, rel=0.002)


def test_a_measured_gather_on_a_tpu() -> None:
    """The scaling book prints 680 us for an array of 2048 x 8192 in 16 bits over 4 chips of a v5e slice of 4 x 4."""
    communication = Communication(CollectiveKind.ALL_GATHER, 2048 * 8192 * 2, (0, 1, 2, 3))
    estimated_s = communication_cost(communication, of_chips("tpu-v5e", 16, chips=16)).seconds
    assert estimated_s == pytest.approx(680 * US, rel=0.02)


def test_an_all_to_all_on_a_torus_takes_a_quarter_of_a_gather() -> None:
    """Of everybody's buffers, each chip's own not counted: chunks go a quarter of the way round, not all of it."""
    pod, ranks = of_chips("tpu-v5e", 256, chips=256), tuple(range(16))
    exchanged = communication_cost(Communication(CollectiveKind.ALL_TO_ALL, 10**10, ranks), pod).seconds
    gathered = communication_cost(Communication(CollectiveKind.ALL_GATHER, 16 * 10**10, ranks), pod).seconds
    assert exchanged / gathered == pytest.approx(16 / 15 / 4, rel=1e-3)


def test_chips_of_many_slices_share_what_leaves_them() -> None:
    """Two slices of 256: inside as above, and each chip a 256th of the buffer over its own network, there and back."""
    network = catalog.network_link(25)
    communication = Communication(CollectiveKind.ALL_REDUCE, 10**10, tuple(range(512)))
    inside_s = 2 * 255 / 256 * 1e10 / (4 * 45e9 * 0.82)
    outside_s = 1e10 / 256 / (25e9 / 8 * network.bandwidth_share)
    estimated_s = communication_cost(communication, of_chips("tpu-v5e", 512, chips=256, network=network)).seconds
    assert estimated_s == pytest.approx(inside_s + outside_s, rel=1e-3)


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
def test_an_all_reduce_takes_no_longer_than_its_two_halves(ranks: tuple[int, ...], num_bytes: int) -> None:
    """A ring is a reduce-scatter and an all-gather; other ways are taken where they are faster."""
    parts = (
        cost_estimate(kind, num_bytes, ranks) for kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
    )
    whole = cost_estimate(CollectiveKind.ALL_REDUCE, num_bytes, ranks, SWITCH).seconds
    assert whole <= sum(part.seconds for part in parts) * (1 + 1e-12)


@given(st.sampled_from(CollectiveKind), GROUPS, BYTES, BYTES)
def test_more_bytes_take_no_less(
    kind: CollectiveKind, ranks: tuple[int, ...], num_bytes_a: int, num_bytes_b: int
) -> None:
    ranks = ranks[:2] if kind is CollectiveKind.SEND else ranks
    low, high = (
        cost_estimate(kind, num_bytes, ranks, SWITCH).seconds for num_bytes in sorted((num_bytes_a, num_bytes_b))
    )
    assert 0 <= low <= high


@given(st.sampled_from([kind for kind in CollectiveKind if kind is not CollectiveKind.SEND]), BYTES)
def test_more_ranks_of_a_node_take_no_less(kind: CollectiveKind, num_bytes: int) -> None:
    times_s = [cost_estimate(kind, num_bytes, tuple(range(n))).seconds for n in range(1, 9)]
    assert times_s[0] == 0.0  # a group of one
    assert times_s == sorted(times_s)


def test_an_all_to_all_over_nodes_may_wait_for_what_stays_inside() -> None:
    """The same with links changed about: seven parts of 16 go over the slower link inside the node."""
    slow_inside = cluster(16, intra=OUTER, inter=INNER)
    cost_s = communication_cost(
        Communication(CollectiveKind.ALL_TO_ALL, 16 * 10**8, tuple(range(16))), slow_inside
    ).seconds
    assert cost_s == pytest.approx(SIMPLE_S + (20 + 6 * 3) * US + 7 * 1e8 / 45e9)


def test_how_sure_a_price_is_depends_on_size_and_tier() -> None:
    sure = INNER.model_copy(update={"relative_std": Spread(small=0.3, medium=0.2, large=0.1), "fitted_on": "records"})
    node = cluster(16, intra=sure)
    sizes = (MIB - 1, MIB, 64 * MIB - 1, 64 * MIB)
    estimates = [communication_cost(Communication(CollectiveKind.ALL_GATHER, size, (0, 1)), node) for size in sizes]
    assert [cost_estimate.relative_std for cost_estimate in estimates] == [0.3, 0.2, 0.2, 0.1]
    assert {cost_estimate.provenance for cost_estimate in estimates} == {Provenance.PUBLISHED}
    across = communication_cost(Communication(CollectiveKind.ALL_GATHER, MIB, (0, 8)), node)
    assert (across.relative_std, across.provenance) == (OUTER.relative_std.medium, Provenance.DATASHEET)


def test_between_nodes_training_is_less_sure_than_benchmarks() -> None:
    node = cluster(16)
    kernels = node.device.kernels.model_copy(update={"inter_node_std": 0.7})
    node = node.model_copy(update={"device": node.device.model_copy(update={"kernels": kernels})})
    inside, across = (communication_cost(Communication(CollectiveKind.SEND, MIB, (0, other)), node) for other in (1, 8))
    assert (inside.relative_std, across.relative_std) == (INNER.relative_std.medium, 0.7)


LIBRARIES = st.sampled_from([INNER, SWITCH, GLOO, catalog.link("ici")])


@given(st.sampled_from(CollectiveKind), GROUPS, st.integers(1, 10**10), LIBRARIES)
def test_formulas_come_to_the_price(
    kind: CollectiveKind, ranks: tuple[int, ...], num_bytes: int, intra: LinkSpec
) -> None:
    estimate = cost_estimate(kind, num_bytes, ranks[:2] if kind is CollectiveKind.SEND else ranks, intra)
    assert value_of(estimate.formula) == pytest.approx(estimate.seconds, rel=0.01)


def test_tokens_for_experts_cross_the_network_once_for_each_node() -> None:
    """Against tokens dealt out by hand: 16 experts on 16 ranks of two nodes, of which each token takes two.

    Of the 120 pairs 56 are within one node, 28 in each. A token is sent to 2 ranks, and to 1 + 64/120 nodes; of these
    half are its own node. What arrives in a node passes on to its ranks.
    """
    ranks, draw = tuple(range(16)), ExpertDraw(16, 2)
    num_bytes = 2 * GB
    apart = cost_estimate(CollectiveKind.ALL_TO_ALL, num_bytes, ranks)
    once = communication_cost(Communication(CollectiveKind.ALL_TO_ALL, num_bytes, ranks, draw), cluster(16))
    start_s = SIMPLE_S + OUTER.latency_s
    network_s = num_bytes / 2 * (1 + 64 / 120) / 2 / (0.9 * 50 * GB)
    assert once.seconds == pytest.approx(start_s + network_s, rel=1e-4)
    assert apart.seconds == pytest.approx(start_s + num_bytes * 8 / 16 / (0.9 * 50 * GB), rel=1e-3)
    assert "once a node" in once.formula


def test_experts_in_one_node_are_sent_to_as_ever() -> None:
    ranks = tuple(range(8))
    drawn = communication_cost(Communication(CollectiveKind.ALL_TO_ALL, GB, ranks, ExpertDraw(16, 2)), cluster(8))
    assert drawn == cost_estimate(CollectiveKind.ALL_TO_ALL, GB, ranks)


def test_inside_of_a_node_a_token_still_goes_to_every_rank() -> None:
    """Where the network is fast the links inside set the pace: 7 of 8 of the copies pass from rank to rank."""
    communication = Communication(CollectiveKind.ALL_TO_ALL, GB, tuple(range(16)), ExpertDraw(16, 16))
    fast = OUTER.model_copy(update={"bytes_per_s": 10_000 * GB})
    inside_s = GB * 7 / 8 / (0.8 * 400 * GB)
    assert communication_cost(communication, cluster(16, inter=fast)).seconds == pytest.approx(
        inside_s + SIMPLE_S, rel=0.01
    )


@pytest.mark.parametrize(
    ("preset", "num_ranks", "dispatch", "combine"),
    [
        ("dgx-b200", 8, 734.95, 673.84),
        ("gb200-nvl72", 8, 750.15, 684.27),
        ("gb200-nvl72", 16, 661.93, 600.75),
        ("gb200-nvl72", 24, 637.80, 565.53),
        ("gb200-nvl72", 32, 629.79, 547.25),
        ("gb200-nvl72", 36, 612.85, 543.27),
    ],
)
def test_tokens_come_to_their_experts_as_fast_as_was_published(
    preset: str, num_ranks: int, dispatch: float, combine: float
) -> None:
    """HybridEP's own table, which no fit has seen (deepseek-ai/DeepEP at 94a9f8f, docs/README_Hybrid-EP.md).

    4,096 tokens of 7,168 in bf16, 8 experts of each at random, 8 experts a rank, kernels alone on 16 multiprocessors;
    GB/s of what arrives.
    """
    draw = ExpertDraw(8 * num_ranks, 8)
    num_bytes = round(4096 * draw.places(num_ranks) * 7168 * 2)
    communication = Communication(CollectiveKind.ALL_TO_ALL, num_bytes, tuple(range(num_ranks)))
    rate = num_bytes / communication_cost(communication, catalog.cluster(preset)).seconds / 1e9
    assert rate == pytest.approx((dispatch + combine) / 2, rel=0.06)
