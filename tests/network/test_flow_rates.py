"""Flows with rates of their own: an independent simulation of flows, and how far one rate per communication is off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from simpy import Environment, Event

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import FatTree, LeafSpine, Rail, Sites, Topology, topology_problems
from simplan.cost.communication.collectives import algorithm_of
from simplan.model.layer import CollectiveKind
from simplan.network.build import fabric_of
from simplan.network.flows import flows_of
from simplan.network.usage import LinkUse, Usages, link_use
from simplan.predict import contention, predict
from simplan.program.program import Communication, Program
from simplan.program.timeline import Times
from simplan.sim.engine import simulate
from simplan.sim.links import Progress, SharedLinks
from tests.jobs import job_of
from tests.support.problems import is_of

FABRICS: dict[str, Topology] = {
    "leaf-spine": LeafSpine(kind="leaf_spine", nodes_per_leaf=2, oversubscription=4),
    "ecmp": LeafSpine(kind="leaf_spine", nodes_per_leaf=2, spines=4, routing="ecmp"),
    "rail": Rail(kind="rail", nodes_per_group=2, oversubscription=4),
    "fat tree": FatTree(kind="fat_tree", radix=8),
}
KINDS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.SEND,
)
Rates = Literal["communication", "flow"]


class Flow(NamedTuple):
    communication: int
    links: list[int]
    seconds: list[float]  # for which its bytes keep each link busy
    num_bytes: float  # of one connection
    alone_s: float


def cluster_with(topology: Topology, num_devices: int = 64) -> ClusterSpec:
    return catalog.cluster("dgx-h100", num_devices).model_copy(update={"topology": topology})


def drawn(seed: int, number: int) -> list[Communication]:
    """Communications of 64 MiB to 2 GiB."""
    rng, communications = random.Random(seed), list[Communication]()
    for _ in range(number):
        kind = rng.choice(KINDS)
        size = 2 if kind is CollectiveKind.SEND else rng.choice([4, 8, 16, 32])
        communications.append(Communication(kind, 2 ** rng.randint(26, 31), tuple(sorted(rng.sample(range(64), size)))))
    return communications


def simulated_ends(batch: Sequence[Communication], topology: Topology, rates: Rates) -> list[float]:
    """Ends of communications that start together."""
    cluster = cluster_with(topology.model_copy(update={"rate_per": rates}))
    fabric = fabric_of(cluster)
    phases = [
        Usages(cluster, fabric).of(communication, algorithm_of(communication, cluster)) for communication in batch
    ]
    flows = [[flow for phase in usage for flow in phase.flows()] for usage in phases]
    heads = np.cumsum([0, *map(len, flows[:-1])])
    use = link_use([flow for group in flows for flow in group], heads, np.arange(len(batch)), len(fabric.links))
    clock, ends_s = (
        Environment(),
        [algorithm_of(communication, cluster).seconds(communication.num_bytes) for communication in batch],
    )
    links, ended = SharedLinks(clock, use), [Event(clock) for _ in batch]
    for op, head in enumerate(heads.tolist()):
        if use.usage[op] >= 0:
            callbacks = ended[op].callbacks
            assert callbacks is not None
            callbacks.append(lambda _, op=op: ends_s.__setitem__(op, clock.now))  # type: ignore[misc]
            links.run(ended[op], op, head, ends_s[op])
    clock.run()
    return ends_s


def flows_by_hand(batch: Sequence[Communication], topology: Topology) -> tuple[list[Flow], list[float]]:
    """Paths and bytes of all flows, and the latency before each communication."""
    cluster, walked, latencies_s = cluster_with(topology), list[Flow](), list[float]()
    fabric = fabric_of(cluster)
    for number, communication in enumerate(batch):
        way = algorithm_of(communication, cluster)
        alone_s = way.transfer_s(communication.num_bytes)
        latencies_s.append(way.seconds(communication.num_bytes) - alone_s)
        flows = flows_of(way, communication, communication.ranks, cluster, fabric)
        for flow, share in zip(flows.each(), flows.shares.tolist(), strict=True):
            for path, part in fabric.routes(flow.source, flow.destination):
                moved = share * part * communication.num_bytes
                links = [fabric.links[link] for link in path]
                seconds = [
                    moved / link.bytes_per_s / (way.inside if link.is_inside_node else way.between) for link in links
                ]
                connection = share * communication.num_bytes / fabric.num_connections
                walked.append(Flow(number, [*path], seconds, connection, alone_s))
    return walked, latencies_s


def water_filled(flows: Sequence[Flow], running: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Progress per second: bytes per second of all connections rise together, one event at a time."""
    num_links = 1 + max(max(flow.links) for flow in flows)
    busy_s, num_bytes = np.zeros((len(flows), num_links)), np.array([flow.num_bytes for flow in flows])
    for number, flow in enumerate(flows):
        busy_s[number, flow.links] = flow.seconds
    rate, rising, free = np.zeros(len(flows)), running.copy(), np.ones(num_links)
    fastest = num_bytes / np.array([flow.alone_s for flow in flows])
    while rising.any():
        demand = (busy_s[rising] / num_bytes[rising, None]).sum(axis=0)
        level = np.divide(free, demand, out=np.full(num_links, np.inf), where=demand > 0)
        rates = np.minimum(fastest, np.where(busy_s > 0, level, np.inf).min(axis=1))
        now = rising & (rates <= rates[rising].min() * (1 + 1e-12))
        rate[now] = rates[now] / num_bytes[now]
        free = np.maximum(free - rate[now] @ busy_s[now], 0.0)
        rising &= ~now
    return rate


def ends_by_hand(flows: Sequence[Flow], latencies_s: Sequence[float]) -> list[float]:
    """A communication ends with its last flow."""
    left, now_s, ends_s = np.ones(len(flows)), 0.0, [*latencies_s]
    owner = np.array([flow.communication for flow in flows])
    begin_s = np.array(latencies_s)[owner]
    while (left > 0).any():
        running = (left > 0) & (begin_s <= now_s)
        rate = water_filled(flows, running) if running.any() else np.zeros(len(flows))
        later = begin_s[(left > 0) & ~running]
        until_s = np.divide(left, rate, out=np.full(len(flows), np.inf), where=rate > 0).min()
        after_s = min(until_s, later.min(initial=np.inf) - now_s)
        now_s = float(later.min()) if after_s < until_s else now_s + after_s
        left = np.where(running, left - rate * after_s, left)
        left[left < 1e-12] = 0.0
        for number in {int(number_of_owner) for number_of_owner in owner[running & (left == 0)]}:
            ends_s[number] = now_s
    return ends_s


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("seed", range(4))
def test_flows_share_links_as_in_a_simulation_of_flows(fabric: str, seed: int) -> None:
    batch = [
        communication
        for communication in drawn(seed, 4)
        if communication.kind is not CollectiveKind.ALL_TO_ALL or len(communication.ranks) < 32
    ]
    expected = ends_by_hand(*flows_by_hand(batch, FABRICS[fabric]))
    assert simulated_ends(batch, FABRICS[fabric], "flow") == pytest.approx(expected, rel=1e-6)


def test_an_alone_communication_takes_as_long_with_either_kind_of_rates() -> None:
    for topology in FABRICS.values():
        for communication in drawn(0, 8):
            ends_s = [simulated_ends([communication], topology, rates)[0] for rates in ("communication", "flow")]
            assert ends_s[0] == pytest.approx(ends_s[1], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "off", "largest"), [(2, 0.026, 6.4), (3, 0.077, 8.7)])
def test_one_rate_per_communication_is_off_as_documented(number: int, off: float, largest: float) -> None:
    """The figures of docs/explanation/communication.md: durations off by more than 5 %, and the largest factor."""
    ratios = []
    for seed in range(100):
        for topology in FABRICS.values():
            both = [simulated_ends(drawn(seed, number), topology, rates) for rates in ("communication", "flow")]
            ratios += [end_s / other for end_s, other in zip(*both, strict=True)]
    away = np.abs(np.log(ratios))
    assert np.mean(away > np.log(1.05)) == pytest.approx(off, abs=0.0005)
    assert np.exp(away.max()) == pytest.approx(largest, abs=0.05)


def in_simpy(program: Program, seconds: NDArray[np.float64], use: LinkUse, progress: Progress | None) -> Times:
    return simulate(program, seconds, None, use, progress)


@pytest.mark.parametrize("plan", [{"dp_shard": 32}, {"dp_replicate": 4, "pp": 2, "tp": 4}], ids=str)
def test_both_engines_run_flows_alike(plan: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = catalog.model("llama3-8b").model_copy(update={"num_hidden_layers": 4})
    topology = LeafSpine(
        kind="leaf_spine", nodes_per_leaf=2, spines=4, oversubscription=4, routing="ecmp", rate_per="flow"
    )
    job = replace(job_of(model, plan, num_microbatches=2), cluster=cluster_with(topology, 32))
    compiled = predict(job).to_json()
    monkeypatch.setattr(contention, "contended_times", in_simpy)
    assert predict(job).to_json() == compiled
    assert compiled["network"]["contention_s"] > 0


def test_flows_of_large_clusters_and_inside_sites_are_refused() -> None:
    topology = LeafSpine(kind="leaf_spine", nodes_per_leaf=2, rate_per="flow")
    [problem] = topology_problems(cluster_with(topology, 128))
    assert is_of(problem, "cluster.topology.rate_per", "flow", rule="at most 64 devices", fix="remove it")
    sites = Sites(kind="sites", nodes_per_site=4, gbit_per_site=100, latency_s=0.01, inside=topology)
    [problem] = topology_problems(cluster_with(sites))
    assert is_of(problem, "cluster.topology.inside.rate_per", rule="whole topology", fix="next to kind: sites")
