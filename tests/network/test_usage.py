"""Usage of links: without oversubscription the busiest link needs the transfer time of the closed form."""

from __future__ import annotations

import numpy as np
import pytest
from simpy import Environment, Event

from simplan import catalog
from simplan.catalog import link, network_link
from simplan.cluster.machine import this_machine
from simplan.cluster.topology import LeafSpine, Rail, Sites, Switch, Topology
from simplan.cost.communication.algorithm import Pattern
from simplan.cost.communication.collectives import algorithm_of, algorithms_of
from simplan.model.layer import CollectiveKind
from simplan.network.build import fabric_of
from simplan.network.usage import LinkUsage, Usages, in_sequence, link_use, together
from simplan.plan.collectives import Collectives
from simplan.program.program import Communication
from simplan.sim.links import SharedLinks
from tests.network.clusters import SHARDING, torus

NON_BLOCKING = (
    Switch(kind="switch"),
    LeafSpine(kind="leaf_spine", nodes_per_leaf=2),
    Rail(kind="rail", nodes_per_group=2),
)
PATTERNS = (Pattern.HOP, Pattern.RING, Pattern.PAIRWISE)
GROUPS = {
    "one node": range(8),
    "four nodes": range(32),
    "one rank per node": range(3, 32, 8),
    "two ranks per node": (0, 1, 8, 9, 16, 17, 24, 25),
}


def usages_on(topology: Topology, preset: str = "dgx-h100") -> Usages:
    cluster = catalog.cluster(preset, 32).model_copy(update={"topology": topology})
    return Usages(cluster, fabric_of(cluster))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize("topology", NON_BLOCKING, ids=lambda topology: topology.kind)
def test_busiest_link_takes_the_closed_form(topology: Topology, kind: CollectiveKind, group: str) -> None:
    ranks = tuple(GROUPS[group])
    usages = usages_on(topology)
    for num_bytes in (2**12, 2**20, 2**30):
        communication = Communication(kind, num_bytes, ranks[:1] + ranks[-1:] if kind is CollectiveKind.SEND else ranks)
        for way in algorithms_of(communication, usages.cluster):
            [usage] = usages.of(communication, way)
            assert usage.seconds.max() == pytest.approx(usage.transfer_s, rel=1e-9), way.name
            assert usage.fixed_s + usage.transfer_s == pytest.approx(way.seconds(num_bytes), rel=1e-12)


@pytest.mark.parametrize("name", ["hierarchical", "halving_doubling"])
@pytest.mark.parametrize("topology", NON_BLOCKING, ids=lambda topology: topology.kind)
def test_busiest_link_of_each_phase_takes_its_closed_form(topology: Topology, name: str) -> None:
    usages = usages_on(topology)
    communication = Communication(CollectiveKind.ALL_REDUCE, 2**30, tuple(range(32)))
    way = algorithm_of(communication, usages.cluster, collectives=Collectives.model_validate({"all_reduce": name}))
    phases = usages.of(communication, way)
    assert [phase.follows for phase in phases] == [False, True]
    for phase in phases:
        assert phase.seconds.max() == pytest.approx(phase.transfer_s, rel=1e-9)
    assert sum(phase.fixed_s + phase.transfer_s for phase in phases) == pytest.approx(way.seconds(2**30), rel=1e-12)


def test_oversubscribed_uplink_takes_its_share_of_bytes() -> None:
    # a ring over 4 nodes of 2 leaves: each leaf's uplink carries (n-1)/n of the buffer, at 1/16 of the node's network
    usages = usages_on(LeafSpine(kind="leaf_spine", nodes_per_leaf=2, oversubscription=32))
    communication = Communication(CollectiveKind.ALL_GATHER, 2**30, tuple(range(32)))
    way = algorithm_of(communication, usages.cluster)
    [usage] = usages.of(communication, way)
    cluster = usages.cluster
    assert cluster.inter_link is not None
    uplink_bytes_per_s = cluster.inter_link.bytes_per_s * 16 / 32 * way.between
    assert usage.seconds.max() == pytest.approx(31 / 32 * 2**30 / uplink_bytes_per_s, rel=1e-12)


@pytest.mark.parametrize("kind", [*SHARDING, CollectiveKind.ALL_TO_ALL])
@pytest.mark.parametrize(
    ("preset", "shape", "group"),
    [
        ("ici-tpu-v5e", (4, 8), range(32)),  # v5litepod-32
        ("ici-tpu-v5e", (8, 16), range(128)),  # of which one axis closes
        ("ici-tpu-v5e", (4, 8), range(8)),
        ("ici-tpu-v5e", (4, 8), range(0, 32, 8)),
        ("ici-tpu-v5p", (2, 4, 4), range(32)),
        ("ici-tpu-v5p", (4, 4, 8), range(128)),
        ("ici-tpu-v5p", (4, 4, 8), range(4)),  # half an axis is no ring
        ("ici-tpu-v5e", (1, 8), range(8)),
    ],
    ids=str,
)
def test_a_slice_takes_as_long_as_its_busiest_link(
    preset: str, shape: tuple[int, ...], group: range, kind: CollectiveKind
) -> None:
    """With a topology, and without one if the shape is that of the slice's size."""
    cluster, communication = torus(preset, shape), Communication(kind, 2**30, tuple(group))
    way = algorithm_of(communication, cluster)
    [usage] = Usages(cluster, fabric_of(cluster)).of(communication, way)
    if kind is CollectiveKind.ALL_REDUCE:  # on a line another link is the busiest in either half
        half = communication._replace(kind=CollectiveKind.REDUCE_SCATTER)
        assert usage.transfer_s == pytest.approx(2 * algorithm_of(half, cluster).transfer_s(2**30), rel=1e-9)
        assert usage.seconds.max() <= usage.transfer_s * (1 + 1e-9)
    else:
        assert usage.seconds.max() == pytest.approx(usage.transfer_s, rel=1e-9)
    plain = cluster.model_copy(update={"topology": None})
    if shape != (1, 8):
        assert algorithm_of(communication, plain) == way


def test_rings_cross_a_distance_once_a_lap() -> None:
    usages = usages_on(Sites(kind="sites", nodes_per_site=2, gbit_per_site=400, latency_s=0.01))
    distances_s = {}
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.SEND):
        ranks = (0, 31) if kind is CollectiveKind.SEND else tuple(range(32))
        communication = Communication(kind, 2**30, ranks)
        way = next(way for way in algorithms_of(communication, usages.cluster) if way.pattern in ("ring", "hop"))
        distances_s[kind] = usages.of(communication, way)[0].distance_s
    # there and back in every lap of 31 of 32 hops
    assert distances_s[CollectiveKind.ALL_GATHER] == pytest.approx(0.02 * 31 / 32)
    assert distances_s[CollectiveKind.ALL_REDUCE] == pytest.approx(0.04 * 31 / 32)
    assert distances_s[CollectiveKind.SEND] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("kind", "name", "steps"),
    [
        (CollectiveKind.ALL_REDUCE, "halving_doubling", 4),  # two halvings and two doublings over four nodes
        (CollectiveKind.ALL_REDUCE, "hierarchical", 6),  # two laps of three steps
        (CollectiveKind.ALL_REDUCE, "parameter_server", 2),  # push and pull
        (CollectiveKind.ALL_TO_ALL, "hierarchical", 1),
    ],
)
def test_steps_inside_nodes_cross_no_distance(kind: CollectiveKind, name: str, steps: int) -> None:
    usages = usages_on(Sites(kind="sites", nodes_per_site=2, gbit_per_site=400, latency_s=0.01))
    communication = Communication(kind, 2**30, tuple(range(32)))
    way = algorithm_of(communication, usages.cluster, None, Collectives.model_validate({kind.value: name}))
    assert usages.of(communication, way)[0].distance_s == pytest.approx(steps * 0.01)


@pytest.mark.parametrize(
    ("kind", "window", "share"),
    [
        (CollectiveKind.SEND, None, 2 * 8 * 128 * 1024),  # two channels, each with eight steps of 128 kB in flight
        (CollectiveKind.ALL_GATHER, None, 8 * 2 * 4 * 2**20 / (31 / 32)),  # eight cards, two channels of 4 MiB each
        (CollectiveKind.ALL_TO_ALL, None, 32 * 2 * 8 * 128 * 1024),  # a 32nd of the buffer for each device
        (CollectiveKind.SEND, 2**26, 2**26),
    ],
)
def test_two_sites_move_a_window_per_round_trip(kind: CollectiveKind, window: int | None, share: float) -> None:
    """However wide the link is; 4 MiB per channel are 3.4 GB/s over eight cards at 20 ms."""
    for gbit in (400, 100_000):
        topology = Sites(kind="sites", nodes_per_site=2, gbit_per_site=gbit, latency_s=0.01, window_bytes=window)
        usages, ranks = usages_on(topology), (0, 31) if kind is CollectiveKind.SEND else tuple(range(32))
        communication = Communication(kind, 2**30, ranks)
        way = next(way for way in algorithms_of(communication, usages.cluster) if way.pattern in PATTERNS)
        [usage] = usages.of(communication, way)
        assert usage.window_s == pytest.approx(2**30 / share * 0.02, rel=1e-9)
        limited = usage.windowed()
        assert limited.transfer_s == max(usage.transfer_s, usage.window_s)
        assert limited.distance_s - usage.distance_s == pytest.approx(limited.transfer_s - usage.transfer_s)


def test_near_nodes_have_no_window() -> None:
    usages = usages_on(NON_BLOCKING[1])
    communication = Communication(CollectiveKind.ALL_GATHER, 2**30, tuple(range(32)))
    [usage] = usages.of(communication, algorithm_of(communication, usages.cluster))
    assert usage.window_s == 0
    assert usage.windowed() == usage


def test_usages_add_up_side_by_side_and_in_sequence() -> None:
    usages = usages_on(NON_BLOCKING[0])
    (in_node,), (other,) = (
        usages.of(c, algorithm_of(c, usages.cluster))
        for c in (Communication(CollectiveKind.ALL_REDUCE, 2**28, group) for group in (tuple(range(8)), (0, 8, 16, 24)))
    )
    both = together([in_node, other])
    total = np.bincount(np.concatenate([in_node.links, other.links]), np.concatenate([in_node.seconds, other.seconds]))
    assert both.seconds == pytest.approx(total[both.links])
    assert together([in_node, in_node]).transfer_s == in_node.transfer_s
    first, second = in_sequence([in_node, other, in_node], 0.5)
    assert (first.transfer_s, second.transfer_s) == (2 * in_node.transfer_s, other.transfer_s)
    assert first.seconds == pytest.approx(2 * in_node.seconds)
    assert (first.fixed_s, second.fixed_s, first.follows, second.follows) == (0.5, 0.0, False, True)


def test_a_broadcast_waits_only_in_the_phase_that_shares_a_link() -> None:
    """Another job takes 40 % of the link of the second host, which sends in the last third of gloo's broadcast."""
    cluster = this_machine(4, link("loopback"), num_nodes=4, inter_link=network_link(1, "tcp"))
    cluster = cluster.model_copy(update={"topology": Switch(kind="switch")})
    usages = Usages(cluster, fabric_of(cluster))
    communication = Communication(CollectiveKind.BROADCAST, 2**30, (0, 1, 2, 3))
    phases = usages.of(communication, algorithm_of(communication, cluster))
    [from_second] = usages.of(Communication(CollectiveKind.SEND, 1, (1, 0)), algorithm_of(communication, cluster))
    [uplink] = np.intersect1d(from_second.links, phases[1].links)
    busy = LinkUsage(np.array([uplink]), np.array([0.4]), np.ones(1), 0.0, 1.0, np.zeros(1))
    use = link_use(phases, np.zeros(1, int), np.zeros(1, int), len(usages.fabric.links), [busy])
    clock = Environment()
    done = Event(clock)
    SharedLinks(clock, use).run(done, 0, 0, sum(phase.fixed_s + phase.transfer_s for phase in phases))
    clock.run(done)
    fixed_s, third_s = phases[0].fixed_s, phases[1].transfer_s
    assert phases[0].transfer_s == pytest.approx(2 * third_s)
    assert clock.now == pytest.approx(fixed_s + 2 * third_s + third_s / 0.6, rel=1e-9)
