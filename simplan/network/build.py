"""Builds the fabric of a cluster from its topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import (
    Dragonfly,
    FatTree,
    Graph,
    LayeredTopology,
    LeafSpine,
    Rail,
    Sites,
    Switch,
    Torus,
    node_of_name,
    topology_problems,
)
from simplan.errors import Problem, SpecError
from simplan.network.dragonfly import DragonflyInterconnect
from simplan.network.fabric import Fabric, GraphBuilder, Interconnect, Level, Wiring
from simplan.network.graph import GraphInterconnect
from simplan.network.tree import SwitchTier, TreeInterconnect
from simplan.network.window import CHANNELS
from simplan.network.wiring import PcieWiring, SwitchWiring, TorusWiring

Ints = NDArray[np.int64]
_BYTES_PER_GBIT = 1e9 / 8


@lru_cache(maxsize=8)
def fabric_of(cluster: ClusterSpec) -> Fabric:
    """Links, switches and routes of a cluster; without a topology, of one switch for all nodes.

    The nodes of background jobs are included: device numbers are those of ``ClusterSpec.fabric_cluster``.

    Raises:
        SpecError: The cluster cannot have its topology, or lacks a link.
    """
    cluster = cluster.fabric_cluster
    problems = [*topology_problems(cluster), *_missing_links(cluster)]
    if problems:
        raise SpecError(problems)
    builder, kind = GraphBuilder(), cluster.device.kind
    word = "device" if kind == "other" else kind
    node_of_device = np.arange(cluster.num_devices, dtype=np.int32) // cluster.devices_per_node
    for device, node in enumerate(node_of_device.tolist()):
        builder.add_vertex(f"node{node}.{word}{device - node * cluster.devices_per_node}")
    wiring = _wiring(builder, cluster) if cluster.ranks_per_node > 1 else None
    interconnect, card_of_device = None, np.zeros(0, dtype=np.int32)
    if cluster.num_nodes > 1:
        ports, per_node = cluster.network_ports_per_node, cluster.devices_per_node
        local = np.arange(cluster.num_devices, dtype=np.int64) - node_of_device * per_node
        first_card = len(builder.vertices)
        for node in range(cluster.num_nodes):
            for port in range(ports):
                builder.add_vertex(f"node{node}.nic{port}")
        card_of_device = (first_card + node_of_device * ports + local * ports // per_node).astype(np.int32)
        interconnect = _interconnect(builder, cluster)
    levels = [("node", node_of_device)]
    if interconnect is not None:
        levels += interconnect.levels(card_of_device)
    fabric = Fabric(
        num_devices=cluster.num_devices,
        vertices=tuple(builder.vertices),
        links=tuple(builder.links),
        levels=tuple(levels),
        is_symmetric=not cluster.slow_links and not cluster.is_mixed and _is_symmetric(cluster, levels),
        wiring=wiring,
        interconnect=interconnect,
        node_of_device=node_of_device,
        card_of_device=card_of_device,
    )
    return _with_slow_links(fabric, cluster) if cluster.slow_links else fabric


def _with_slow_links(fabric: Fabric, cluster: ClusterSpec) -> Fabric:
    """The fabric with the bandwidth that slow links have left; flapping ones keep theirs, and have names checked.

    Raises:
        SpecError: A link is not in the fabric.
    """
    links = list(fabric.links)
    for number, slow in enumerate(cluster.slow_links):
        try:
            index = fabric.link_named(slow.link)
        except SpecError as error:
            (problem,) = error.problems
            raise SpecError(replace(problem, field=f"cluster.slow_links.{number}.link")) from None
        if slow.period_s is None:
            links[index] = links[index]._replace(bytes_per_s=slow.bandwidth_share * links[index].bytes_per_s)
    return replace(fabric, links=tuple(links))


def _missing_links(cluster: ClusterSpec) -> list[Problem]:
    problems = []
    if cluster.ranks_per_node > 1 and cluster.intra_link is None:
        rule, fix = "is missing: devices of one node need a link", "name a link, e.g. pcie4"
        problems.append(Problem(field="cluster.intra_link", rule=rule, fix=fix))
    if cluster.num_nodes > 1 and cluster.inter_link is None:
        rule, fix = f"is missing: {cluster.num_nodes} nodes need a network", "give the Gbit/s of a network card"
        problems.append(Problem(field="cluster.nic_gbit", rule=rule, fix=fix))
    return problems


def _is_symmetric(cluster: ClusterSpec, levels: Sequence[Level]) -> bool:
    """True for trees of groups of one size without hashing, and alike nodes."""
    topology = cluster.topology or Switch(kind="switch")
    inside = topology.inside if isinstance(topology, Sites) else topology
    if isinstance(topology, Dragonfly | Graph | Torus) or topology.node is not None:
        return False
    ports = cluster.network_ports_per_node
    if cluster.devices_per_node % ports:
        return False
    sizes = [np.bincount(domain) for _, domain in levels]
    if any((size != size[0]).any() for size in sizes):
        return False
    if isinstance(inside, FatTree) and (inside.radix - inside.uplinks) % ports:
        return False
    if isinstance(inside, Rail) and inside.rails is not None and ports % inside.rails:
        return False
    return inside is None or not inside.hashes_flows


def _wiring(builder: GraphBuilder, cluster: ClusterSpec) -> Wiring:
    topology = cluster.topology
    if isinstance(topology, Torus):
        return TorusWiring(builder, cluster, topology)
    if topology is not None and topology.node is not None:
        pcie = topology.node
        return PcieWiring(builder, cluster, pcie.devices_per_switch, peer_to_peer=pcie.peer_to_peer)
    return SwitchWiring(builder, cluster)


def _interconnect(builder: GraphBuilder, cluster: ClusterSpec) -> Interconnect:
    """Links between nodes; the last vertices of the builder are the network cards."""
    topology, ports, rate = cluster.topology, cluster.network_ports_per_node, _card_bytes_per_s(cluster)
    num_cards = cluster.num_nodes * ports
    if isinstance(topology, Dragonfly):
        nodes = np.repeat(np.arange(cluster.num_nodes, dtype=np.int64), ports)
        return DragonflyInterconnect(
            builder,
            nodes // topology.nodes_per_router,
            routers_per_group=topology.routers_per_group,
            card_bytes_per_s=rate,
            local_bytes_per_s=(topology.local_gbit or topology.global_gbit) * _BYTES_PER_GBIT,
            global_bytes_per_s=topology.global_gbit * _BYTES_PER_GBIT,
            adaptive=topology.routing == "adaptive",
        )
    if isinstance(topology, Graph):
        return _graph(builder, topology, cluster, rate)
    if isinstance(topology, Sites):
        tiers = _tiers_of_sites(topology, cluster.num_nodes, ports, rate)
    else:
        inside = topology if isinstance(topology, LeafSpine | Rail | FatTree) else None
        tiers = _tiers(inside, cluster.num_nodes, ports, rate)
        while len(tiers) > 1 and len(tiers[-2].names) == 1:  # nothing is joined by the last tier
            tiers = tiers[:-1]
    hashed = topology.inside if isinstance(topology, Sites) else topology
    if isinstance(hashed, LayeredTopology) and hashed.hashes_flows:
        return TreeInterconnect(builder, num_cards, tiers, _connections(hashed, cluster), hashed.seed)
    return TreeInterconnect(builder, num_cards, tiers)


def _connections(topology: LayeredTopology | Graph, cluster: ClusterSpec) -> int:
    """Connections between two network cards: by default a queue pair for each of NCCL's channels, or one of gloo's."""
    link = cluster.intra_link or cluster.inter_link
    default = CHANNELS if link is None or link.library == "nccl" else 1
    return topology.connections or default


def _card_bytes_per_s(cluster: ClusterSpec) -> float:
    """Bandwidth of a network card in one direction; of all cards of a device together if it has several."""
    assert cluster.inter_link is not None, "several nodes have a link"
    return cluster.inter_link.bytes_per_s * cluster.devices_per_node / cluster.network_ports_per_node


def _tiers(
    topology: Switch | LeafSpine | Rail | FatTree | None, nodes: int, ports: int, rate: float
) -> list[SwitchTier]:
    """Tiers of a tree, the last with one group."""
    match topology:
        case LeafSpine():
            return _leaf_spine(topology, nodes, ports, rate)
        case Rail():
            return _rail(topology, nodes, ports, rate)
        case FatTree():
            return _fat_tree(topology, nodes, ports, rate)
        case _:
            cards = nodes * ports
            return [SwitchTier("switch", np.zeros(cards, dtype=np.int64), np.full(cards, rate), ("switch",))]


def _leaf_spine(topology: LeafSpine, nodes: int, ports: int, rate: float) -> list[SwitchTier]:
    leaf = np.repeat(np.arange(nodes, dtype=np.int64) // topology.nodes_per_leaf, ports)
    leaves, planes = int(leaf[-1]) + 1, _planes(topology)
    tiers = [_tier("leaf", leaf, rate)]
    uplink = topology.nodes_per_leaf * ports * rate / topology.oversubscription
    if topology.leaves_per_pod is None:
        return [*tiers, _tier("spine", np.zeros(leaves, dtype=np.int64), uplink, planes=planes)]
    pod = np.arange(leaves, dtype=np.int64) // topology.leaves_per_pod
    of_pod = topology.leaves_per_pod * uplink / topology.pod_oversubscription
    core = np.zeros(int(pod[-1]) + 1, dtype=np.int64)
    return [*tiers, _tier("pod", pod, uplink, suffix=".spine", planes=planes), _tier("core", core, of_pod)]


def _rail(topology: Rail, nodes: int, ports: int, rate: float) -> list[SwitchTier]:
    rails = topology.rails or ports
    group, rail = np.arange(nodes, dtype=np.int64) // topology.nodes_per_group, np.arange(ports) % rails
    leaf = (group[:, None] * rails + rail[None, :]).ravel()
    groups = int(group[-1]) + 1
    names = tuple(f"group{index}.rail{rail_index}" for index in range(groups) for rail_index in range(rails))
    cards = topology.nodes_per_group * np.bincount(rail, minlength=rails)
    uplinks = np.tile(cards * rate / topology.oversubscription, groups)
    spine = np.zeros(groups * rails, dtype=np.int64)
    return [
        SwitchTier("leaf", leaf, np.full(len(leaf), rate), names),
        SwitchTier("spine", spine, uplinks, ("spine",), planes=_planes(topology)),
    ]


def _fat_tree(topology: FatTree, nodes: int, ports: int, rate: float) -> list[SwitchTier]:
    up, half = topology.uplinks, topology.radix // 2
    leaf = np.arange(nodes * ports, dtype=np.int64) // (topology.radix - up)
    leaves, hashes = int(leaf[-1]) + 1, topology.hashes_flows
    first = _tier("leaf", leaf, rate)
    planes = up if hashes else 1
    if topology.levels == 2:
        return [first, _tier("core", np.zeros(leaves, dtype=np.int64), up * rate, planes=planes)]
    pod = np.arange(leaves, dtype=np.int64) // half
    core = np.zeros(int(pod[-1]) + 1, dtype=np.int64)
    return [
        first,
        _tier("pod", pod, up * rate, suffix=".aggregation", planes=planes),
        _tier("core", core, up * half * rate, planes=half if hashes else 1),
    ]


def _tiers_of_sites(topology: Sites, nodes: int, ports: int, rate: float) -> list[SwitchTier]:
    """Tiers of every site, each site's border, and the network between sites."""
    site = np.arange(nodes, dtype=np.int64) // topology.nodes_per_site
    sites, site_rate = int(site[-1]) + 1, topology.gbit_per_site * _BYTES_PER_GBIT
    site_tiers = _tiers(topology.inside, topology.nodes_per_site, ports, rate)
    tiers, num_below = [], nodes * ports
    for tier in site_tiers:
        whole, groups = len(tier.group_of), len(tier.names)
        below = np.arange(num_below, dtype=np.int64)
        tiers.append(
            tier._replace(
                group_of=tier.group_of[below % whole] + below // whole * groups,
                uplink_bytes_per_s=tier.uplink_bytes_per_s[below % whole],
                names=tuple(f"site{index}.{name}" for index in range(sites) for name in tier.names),
            )
        )
        num_below = sites * groups
    numbers = np.arange(sites, dtype=np.int64)
    if np.prod([tier.planes for tier in site_tiers]) > 1:
        tiers.append(_tier("site", numbers, site_rate, suffix=".border")._replace(merges=True))
    wan = np.zeros(sites, dtype=np.int64)
    return [*tiers, _tier("wan", wan, site_rate)._replace(latency_s=(topology.latency_s or 0.0) / 2)]


def _tier(name: str, group_of: Ints, uplink_bytes_per_s: float, *, suffix: str = "", planes: int = 1) -> SwitchTier:
    """SwitchTier of numbered groups with equal uplinks; a single group above all others has no number."""
    groups = int(group_of.max()) + 1
    is_top = groups == 1 and name in ("spine", "core", "wan")
    names = (name,) if is_top else tuple(f"{name}{index}{suffix}" for index in range(groups))
    return SwitchTier(name, group_of, np.full(len(group_of), uplink_bytes_per_s), names, planes)


def _planes(topology: LeafSpine | Rail) -> int:
    return (topology.spines or 1) if topology.hashes_flows else 1


def _graph(builder: GraphBuilder, topology: Graph, cluster: ClusterSpec, rate: float) -> GraphInterconnect:
    nodes, ports = cluster.num_nodes, cluster.network_ports_per_node
    first_card, first_link = len(builder.vertices) - nodes * ports, len(builder.links)
    vertex: dict[str, int] = {f"node{node}": builder.add_vertex(f"node{node}") for node in range(nodes)}
    for name in _switches(topology):
        vertex[name] = builder.add_vertex(name)
    for card in range(nodes * ports):
        builder.add_cable(first_card + card, vertex[f"node{card // ports}"], rate)
    for link in topology.links:
        first, second = (vertex[name] for name in link.between)
        builder.add_cable(first, second, link.gbit * _BYTES_PER_GBIT, latency_s=link.latency_s)
    adaptive = topology.routing == "adaptive"
    connections = 1 if adaptive else _connections(topology, cluster)
    return GraphInterconnect(builder, first_card, first_link, connections, topology.seed, adaptive=adaptive)


def _switches(topology: Graph) -> Sequence[str]:
    names = (name for link in topology.links for name in link.between)
    return tuple(dict.fromkeys(name for name in names if node_of_name(name) is None))
