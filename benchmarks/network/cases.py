"""Networks, plans and sizes of the comparison, as data.

Every network is written twice: as cables of hosts, and as the cluster of a scenario. What is measured runs on the
cables, what is predicted knows the scenario only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from simplan.model.layer import CollectiveKind
from simplan.units import MIB
from tests.hosts import Wire

_STAR = 4  # hosts of a star, unless its name has another number
BASE_MBIT_PER_S = 100.0
"""Rate of a host's link, unless a network is about another one."""
COLLECTIVES = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.BROADCAST,
)
SIZES_BYTES = (1 * MIB, 4 * MIB)
"""Sizes; smaller ones are a matter of latency, which shaping does not change."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Traffic of another job: one TCP connection at a constant rate.

    Attributes:
        source, destination: Numbers of hosts.
        mbit_per_s: Rate on the wire, headers included.
    """

    source: int
    destination: int
    mbit_per_s: float


@dataclass(frozen=True, slots=True)
class ShapedNetwork:
    """Hosts with one rank each, and the links between them.

    Attributes:
        name: Name in file names.
        words: Description in the report.
        wires: Cables of the hosts.
        cluster: YAML of the topology and slow links in a scenario.
        mbit_per_s: Rate of a host's link.
        stream: Traffic of another job.
        alike: Collectives that load the links of another network in the same way, so that neither is faster.
    """

    name: str
    words: str
    wires: tuple[Wire, ...]
    cluster: str
    mbit_per_s: float = BASE_MBIT_PER_S
    stream: Stream | None = None
    alike: tuple[CollectiveKind, ...] = ()

    @property
    def num_hosts(self) -> int:
        """Hosts."""
        return len({end for wire in self.wires for end in wire.ends if end.startswith("node")})

    def cluster_yaml(self, *, alone: bool = False) -> str:
        """Cluster of a scenario, in YAML; alone without the traffic of another job, which a run refuses."""
        n, gbit = self.num_hosts, self.mbit_per_s / 1000
        preset = f"preset: this-machine, num_devices: {n}, num_nodes: {n}, inter_link_gbit_per_device: {gbit:g}"
        if alone or (stream := self.stream) is None:
            return f"{{{preset}, {self.cluster}}}"
        flow = f"from: node{stream.source}, to: node{stream.destination}, gbit: {stream.mbit_per_s / 1000:g}"
        return f"{{{preset}, {self.cluster}, background: [{{{flow}}}]}}"


def star(num_hosts: int, mbit_per_s: float = BASE_MBIT_PER_S) -> ShapedNetwork:
    """Hosts on one switch."""
    wires = tuple(Wire((f"node{k}", "switch"), mbit_per_s) for k in range(num_hosts))
    of_other = "" if num_hosts == _STAR else f"-of-{num_hosts}"
    name, words = f"star-{mbit_per_s:.0f}{of_other}", f"star, {mbit_per_s:.0f} Mbit/s"
    return ShapedNetwork(name, words, wires, "topology: {kind: switch}", mbit_per_s)


def two_tiers(name: str, oversubscription: int, *, stream: Stream | None = None) -> ShapedNetwork:
    """Two leaf switches with two hosts each, below a spine."""
    uplink = 2 * BASE_MBIT_PER_S / oversubscription
    leaves = tuple(Wire((f"node{k}", f"leaf{k // 2}"), BASE_MBIT_PER_S) for k in range(4))
    wires = (*leaves, Wire(("leaf0", "spine"), uplink), Wire(("leaf1", "spine"), uplink))
    cluster = f"topology: {{kind: leaf_spine, nodes_per_leaf: 2, oversubscription: {oversubscription}}}"
    words = f"two tiers, {oversubscription}:1"
    if stream is not None:
        words += f", another job sends {stream.mbit_per_s:.0f} Mbit/s"
    return ShapedNetwork(name, words, wires, cluster, stream=stream)


def _shuffled() -> ShapedNetwork:
    """The two tiers with hosts on leaves in turn, so that neighbors by rank are on different leaves."""
    cables = [((f"node{k}", f"leaf{k % 2}"), BASE_MBIT_PER_S) for k in range(4)]
    cables += [((f"leaf{k}", "spine"), BASE_MBIT_PER_S / 2) for k in range(2)]
    return replace(_graph("shuffled", "two tiers, 4:1, hosts shuffled", cables), alike=(CollectiveKind.ALL_TO_ALL,))


def _slow_link() -> ShapedNetwork:
    wires = tuple(Wire((f"node{k}", "switch"), BASE_MBIT_PER_S / (4 if k == 2 else 1)) for k in range(4))
    ends = ("node2.nic0 -> switch", "switch -> node2.nic0")
    slow = ", ".join(f"{{link: {end}, bandwidth_share: 0.25}}" for end in ends)
    cluster = f"topology: {{kind: switch}}, slow_links: [{slow}]"
    return ShapedNetwork("slow-link", "star, one link with a fourth", wires, cluster)


def _ring() -> ShapedNetwork:
    n, base = 5, BASE_MBIT_PER_S
    cables = [((f"switch{k}", f"switch{(k + 1) % n}"), base / 4 if k == n - 1 else base) for k in range(n)]
    cables = [((f"node{k}", f"switch{k}"), base) for k in range(n)] + cables
    return _graph("ring", "ring of five switches, one cable with a fourth", cables)


def _graph(name: str, words: str, cables: Sequence[tuple[tuple[str, str], float]]) -> ShapedNetwork:
    links = ", ".join(f"{{between: [{a}, {b}], gbit: {mbit / 1000:g}}}" for (a, b), mbit in cables)
    wires = tuple(Wire(ends, mbit) for ends, mbit in cables)
    return ShapedNetwork(name, words, wires, f"topology: {{kind: graph, links: [{links}]}}")


NETWORKS = (
    star(4),
    two_tiers("uplink-4", 4),
    _shuffled(),
    _slow_link(),
    _ring(),
    two_tiers("two-jobs", 2, stream=Stream(1, 3, 40.0)),
)
_WIDE = "{family: gpt, num_hidden_layers: 2, hidden_size: 192, num_attention_heads: 2, vocab_size: 512, seq_len: 32}"
_LONG = "{{family: gpt, num_hidden_layers: {}, hidden_size: 32, num_attention_heads: 1, vocab_size: 64, seq_len: 64}}"


@dataclass(frozen=True, slots=True)
class ShapedPlan:
    """Training step to measure.

    Attributes:
        name: Name in file names.
        words: Description in the report.
        wide: True for many weights and few tokens, False for the reverse.
        degrees: Parallelism in a scenario, with ``{n}`` for the number of hosts.
        networks: Networks on which it runs; empty for all.
        placed: Group of plans that differ in the placement only.
        num_steps: Steps to measure, then to run before.
    """

    name: str
    words: str
    wide: bool
    degrees: str
    networks: tuple[str, ...] = ()
    placed: str = ""
    num_steps: tuple[int, int] = (5, 1)


_TIERS = ("uplink-4",)
PLANS = (
    ShapedPlan("ddp", "DDP", True, "dp_replicate: {n}"),
    ShapedPlan("fsdp", "FSDP", True, "dp_shard: {n}"),
    ShapedPlan("hsdp", "HSDP", True, "dp_replicate: 2, dp_shard: 2", ("star-100", "slow-link", "two-jobs")),
    ShapedPlan("1f1b", "1F1B", False, "pp: {n}, schedule: 1f1b"),
    *(
        ShapedPlan(
            f"pp-dp-{first}",
            f"2 stages x 2 replicas, {first} on a leaf",
            True,
            f"pp: 2, dp_replicate: 2, schedule: 1f1b, placement: [{first}, {second}]",
            _TIERS,
            "2 stages x 2 replicas",
        )
        for first, second in (("pp", "dp"), ("dp", "pp"))
    ),
    *(
        ShapedPlan(
            f"hsdp-{first}",
            f"HSDP 2 x 2, {first} on a leaf",
            True,
            f"dp_replicate: 2, dp_shard: 2, placement: [{first}, {second}]",
            _TIERS,
            "HSDP 2 x 2",
        )
        for first, second in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard"))
    ),
)


def scenario_text(network: ShapedNetwork, plan: ShapedPlan, *, alone: bool = False) -> str:
    """Scenario of a plan on a network, in YAML; alone as in ``ShapedNetwork.cluster_yaml``."""
    n = network.num_hosts
    model, batch, size = (
        (_WIDE, 4 * n if "pp" in plan.degrees else 2 * n, 2) if plan.wide else (_LONG.format(n), 8 * 16, 16)
    )
    return (
        f"name: {plan.name}-{network.name}\n"
        f"model: {model}\n"
        f"cluster: {network.cluster_yaml(alone=alone)}\n"
        f"training: {{global_batch_size: {batch}, precision: fp32}}\n"
        f"plan: {{{plan.degrees.format(n=n)}, microbatch_size: {size}}}\n"
    )


STEPS = tuple(
    (network, plan) for network, plan in product(NETWORKS, PLANS) if not plan.networks or network.name in plan.networks
)
