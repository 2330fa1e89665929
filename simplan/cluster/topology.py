"""Network topologies of a cluster: how its nodes are joined by links and switches, in a few values.

A topology says how nodes are joined. Rates of network cards stay those of the cluster (``ClusterSpec.inter_link``), as
do rates inside a node (``ClusterSpec.intra_link``). ``simplan.network`` builds the graph of links and its routes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from simplan.base import Gbit, NumDevices, Seconds, Spec
from simplan.errors import Problem, did_you_mean
from simplan.units import counted, format_time

if TYPE_CHECKING:
    from simplan.cluster.hardware import ClusterSpec

Oversubscription = Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]
"""Bandwidth from below over bandwidth to above of a switch, or of a group of switches."""
Routing = Literal["adaptive", "ecmp"]
MAX_DEVICES_PER_FLOW = 64
"""Devices of a cluster whose flows have rates of their own: an all-to-all has the square of it."""
MAX_LINKS = 2_000_000
"""Directed links of a fabric; more are refused."""
_NODE = re.compile(r"node(0|[1-9][0-9]{0,6})")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,59}")
_FIELD = "cluster.topology"


class Pcie(Spec):
    """Devices of a node on PCIe: they meet at the host, or at a PCIe switch below it.

    The uplink of a PCIe switch has the bandwidth of one device's link (``ClusterSpec.intra_link``).
    """

    kind: Literal["pcie"]
    devices_per_switch: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Devices that share the uplink of a PCIe switch; None for each device on a root port."
    )
    peer_to_peer: bool = Field(
        True,
        description=(
            "True if devices of one PCIe switch reach each other below the host. Without peer-to-peer, "
            "as on GeForce cards, transfers go up to host memory and down."
        ),
    )


class _Topology(Spec):
    """Topology of nodes, with the wiring inside each."""

    node: Pcie | None = Field(
        None,
        description=("Wiring of the devices of a node; None for a switch that joins all of them without contention."),
    )
    rate_per: Literal["communication", "flow"] = Field(
        "communication",
        description=(
            "What has one rate on links that are shared: a communication, as all of its flows wait for the slowest, "
            f"or each flow between two devices, for at most {MAX_DEVICES_PER_FLOW} devices."
        ),
    )

    @property
    def hashes_flows(self) -> bool:
        """True if a hash decides about the path of a flow."""
        return False

    def words(self) -> str:
        """Description in a few words."""
        raise NotImplementedError

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        if cluster.num_nodes > 1 or cluster.intra_link is not None:
            yield from self._problems_of_link(cluster)
        if self.rate_per == "flow":
            yield from self._problems_of_flows(cluster)

    def _problems_of_flows(self, cluster: ClusterSpec) -> Iterator[Problem]:
        field, fix = f"{_FIELD}.rate_per", "remove it, which gives a communication one rate"
        if cluster.num_devices > MAX_DEVICES_PER_FLOW:
            rule = f"simulates flows of at most {MAX_DEVICES_PER_FLOW} devices, and the cluster has "
            yield Problem(field=field, value="flow", rule=f"{rule}{cluster.num_devices:,}", fix=fix)
        if cluster.background_jobs:
            yield Problem(field=field, value="flow", rule="is not modeled together with background jobs", fix=fix)

    def _problems_of_link(self, cluster: ClusterSpec) -> Iterator[Problem]:
        link = cluster.intra_link
        if link is None or not link.torus_axes or cluster.ranks_per_node == 1:
            return
        if self.node is not None:
            yield Problem(field=f"{_FIELD}.node", rule=f"devices joined by {link.id} form a torus", fix="remove it")
        else:
            rule = f"devices joined by {link.id} form a torus of their own"
            fix = "write kind: torus, with the shape of a slice"
            yield Problem(field=f"{_FIELD}.kind", value=_quoted(self), rule=rule, fix=fix)

    def num_links(self, cluster: ClusterSpec) -> int:
        """Upper bound on the directed links between nodes."""
        return 8 * cluster.num_nodes * cluster.network_ports_per_node


class _Hashing(_Topology):
    """Topology in which a hash may decide about the path of a connection (ECMP).

    By default two network cards have a connection for each channel of NCCL: two, each with one queue pair. Sources:
    NVIDIA/nccl, src/graph/connect.cc, which doubles the channels of the rings found; NCCL's user guide,
    ``NCCL_IB_QPS_PER_CONNECTION``, 1 by default.
    """

    connections: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description=(
            "Connections between two network cards, each with a path of its own: channels times queue pairs. "
            "None for 2, as NCCL makes them by default."
        ),
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="Seed of the hash of ecmp.")
    num_seeds: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="Seeds of which a prediction says the range, from seed on."
    )

    def _problems_of_seeds(self, routing: Routing) -> Iterator[Problem]:
        """Settings of a hash without one."""
        for name in ("connections", "seed", "num_seeds"):
            value = getattr(self, name)
            if routing != "ecmp" and value != type(self).model_fields[name].default:
                rule = "is of hashed flows, and adaptive routing has none"
                fix = "write routing: ecmp, or remove it"
                yield Problem(field=f"{_FIELD}.{name}", value=str(value), rule=rule, fix=fix)


class LayeredTopology(_Hashing):
    """Topology with layers of switches, of which a flow has several to choose from."""

    routing: Routing = Field(
        "adaptive",
        description=(
            "adaptive, where the uplinks of a switch are one link of their total bandwidth, or ecmp, "
            "where the hash of a connection picks one uplink."
        ),
    )

    @property
    def hashes_flows(self) -> bool:
        """True if a hash decides about the path of a flow."""
        return self.routing == "ecmp"

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        yield from super().problems(cluster)
        yield from self._problems_of_seeds(self.routing)


class Switch(_Topology):
    """One switch for all nodes, without oversubscription: nodes share nothing except their own network cards."""

    kind: Literal["switch"]

    def words(self) -> str:
        """Description in a few words."""
        return _with_node("one switch for all nodes", self)


class LeafSpine(LayeredTopology):
    """All network cards of a node on one leaf switch, leaves on a layer of spine switches; optionally, pods."""

    kind: Literal["leaf_spine"]
    nodes_per_leaf: NumDevices = Field(description="Nodes on one leaf.")
    oversubscription: Oversubscription = Field(
        1.0, description="Bandwidth of the nodes of a leaf over that of its uplinks."
    )
    spines: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Spine switches that ecmp hashes flows over; None for unknown."
    )
    leaves_per_pod: NumDevices | None = Field(
        None, description="Leaves whose spines form a pod, below one more layer of switches; None for no such layer."
    )
    pod_oversubscription: Oversubscription = Field(
        1.0, description="Bandwidth of the leaves of a pod over that of the uplinks of the pod."
    )

    def words(self) -> str:
        """Description in a few words."""
        text = f"leaf and spine, {counted(self.nodes_per_leaf, 'node')} per leaf, {self.oversubscription:g}:1"
        if self.leaves_per_pod is not None:
            text += f", pods of {counted(self.leaves_per_pod, 'leaf').replace('leafs', 'leaves')}, "
            text += f"{self.pod_oversubscription:g}:1"
        return _with_node(text, self)

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        yield from super().problems(cluster)
        yield from _problems_of_hashing(self)
        if self.leaves_per_pod is None and self.pod_oversubscription != 1:
            rule, fix = "is given without pods", "give leaves_per_pod, or remove it"
            yield Problem(
                field=f"{_FIELD}.pod_oversubscription", value=f"{self.pod_oversubscription:g}", rule=rule, fix=fix
            )

    def num_links(self, cluster: ClusterSpec) -> int:
        """Upper bound on the directed links between nodes."""
        planes = (self.spines or 1) if self.hashes_flows else 1
        return 4 * (cluster.num_nodes // self.nodes_per_leaf + 1) * planes + super().num_links(cluster)


class Rail(LayeredTopology):
    """Network card i of every node of a group on leaf switch i (rail-optimized), leaves on a layer of spines."""

    kind: Literal["rail"]
    nodes_per_group: NumDevices = Field(description="Nodes whose cards share leaves: a scalable unit.")
    oversubscription: Oversubscription = Field(
        1.0, description="Bandwidth of the cards of a leaf over that of its uplinks."
    )
    rails: NumDevices | None = Field(
        None, description="Leaves of a group: card i is on leaf i modulo rails; None for one for each card of a node."
    )
    spines: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Spine switches that ecmp hashes flows over; None for unknown."
    )

    def words(self) -> str:
        """Description in a few words."""
        text = f"rail-optimized, {counted(self.nodes_per_group, 'node')} per group, {self.oversubscription:g}:1"
        return _with_node(text, self)

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        yield from super().problems(cluster)
        yield from _problems_of_hashing(self)
        ports = cluster.network_ports_per_node
        if cluster.num_nodes > 1 and self.rails is not None and self.rails > ports:
            rule = f"is more than the {counted(ports, 'network card')} of a node"
            yield Problem(field=f"{_FIELD}.rails", value=str(self.rails), rule=rule, fix=f"use {ports} or less")

    def num_links(self, cluster: ClusterSpec) -> int:
        """Upper bound on the directed links between nodes."""
        planes = (self.spines or 1) if self.hashes_flows else 1
        leaves = (cluster.num_nodes // self.nodes_per_group + 1) * (self.rails or cluster.network_ports_per_node)
        return 4 * leaves * planes + super().num_links(cluster)


class FatTree(LayeredTopology):
    """Fat tree of equal switches: k ports each, k^3/4 network cards with 3 levels, k^2/2 with 2.

    Cards fill the leaf switches in order. Every cable has the rate of a network card.

    Source: Al-Fares, Loukissas, Vahdat, "A scalable, commodity data center network architecture" (SIGCOMM 2008).
    """

    kind: Literal["fat_tree"]
    radix: Annotated[int, Field(ge=2, le=1024)] = Field(description="Ports k of a switch.")
    levels: Annotated[int, Field(ge=2, le=3)] = Field(3, description="Levels of switches.")
    oversubscription: Oversubscription = Field(
        1.0, description="Ports of a leaf switch to network cards over its ports to above."
    )

    @property
    def uplinks(self) -> int:
        """Ports of a leaf switch to above."""
        return round(self.radix / (self.oversubscription + 1))

    @property
    def capacity(self) -> int:
        """Network cards that the tree can hold."""
        leaves = self.radix if self.levels == 2 else self.radix * (self.radix // 2)
        return leaves * (self.radix - self.uplinks)

    def words(self) -> str:
        """Description in a few words."""
        text = f"fat tree, radix {self.radix}, {self.levels} levels, {self.oversubscription:g}:1"
        return _with_node(text, self)

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        yield from super().problems(cluster)
        if self.radix % 2:
            rule = "must be even, half of the ports of a switch to below and half to above"
            fix = f"use {self.radix - 1} or {self.radix + 1}"
            yield Problem(field=f"{_FIELD}.radix", value=str(self.radix), rule=rule, fix=fix)
            return
        up = self.radix / (self.oversubscription + 1)
        if up < 1 or abs(up - round(up)) > 1e-6:
            near = max(1, min(self.radix // 2, round(up)))
            rule = f"does not divide the {self.radix} ports of a leaf switch into whole numbers"
            fix = f"use {(self.radix - near) / near:.10g}, for {self.radix - near} ports to below and {near} to above"
            field, value = f"{_FIELD}.oversubscription", f"{self.oversubscription:g}"
            yield Problem(field=field, value=value, rule=rule, fix=fix)
            return
        ports = cluster.num_nodes * cluster.network_ports_per_node
        if cluster.num_nodes > 1 and ports > self.capacity:
            rule = f"holds {self.capacity:,} network cards with {self.levels} levels, and the cluster has {ports:,}"
            fix = "use more levels" if self.levels == 2 else "use switches with more ports"
            yield Problem(field=f"{_FIELD}.radix", value=str(self.radix), rule=rule, fix=fix)

    def num_links(self, cluster: ClusterSpec) -> int:
        """Upper bound on the directed links between nodes."""
        ports = cluster.num_nodes * cluster.network_ports_per_node
        return 2 * self.levels * (ports + self.radix**2) if self.hashes_flows else super().num_links(cluster)


class Dragonfly(_Topology):
    """Groups of routers: all pairs of routers of a group have a link, and all pairs of groups.

    Source: Kim, Dally, Scott, Abts, "Technology-driven, highly-scalable dragonfly topology" (ISCA 2008).
    """

    kind: Literal["dragonfly"]
    nodes_per_router: NumDevices = Field(description="Nodes on one router.")
    routers_per_group: Annotated[int, Field(ge=1, le=1024)] = Field(description="Routers of a group.")
    global_gbit: Gbit = Field(description="Bandwidth between two groups in one direction, Gbit/s.")
    local_gbit: Gbit | None = Field(
        None, description="Bandwidth between two routers of a group in one direction, Gbit/s; None for global_gbit."
    )
    routing: Literal["adaptive", "minimal"] = Field(
        "adaptive",
        description=(
            "adaptive, where traffic that would overload its minimal path takes detours over other "
            "routers and groups, or minimal."
        ),
    )

    def words(self) -> str:
        """Description in a few words."""
        text = f"dragonfly, {counted(self.nodes_per_router, 'node')} per router, "
        text += f"{self.routers_per_group} routers per group{', minimal paths' if self.routing == 'minimal' else ''}"
        return _with_node(text, self)

    def num_links(self, cluster: ClusterSpec) -> int:
        """Upper bound on the directed links between nodes."""
        groups = -(-cluster.num_nodes // (self.nodes_per_router * self.routers_per_group))
        return groups**2 + groups * self.routers_per_group**2 + super().num_links(cluster)


class Torus(_Topology):
    """Devices of a slice linked to their neighbors on a torus of 1 to 3 axes (TPU); one switch joins several slices.

    A slice is a node of the cluster. Axes of at least ``LinkSpec.torus_wrap`` devices close to rings.
    """

    kind: Literal["torus"]
    shape: Annotated[tuple[NumDevices, ...], Field(min_length=1, max_length=3)] = Field(
        description="Devices along each axis. Devices are numbered along the last axis first."
    )

    def closes(self, torus_wrap: int | None) -> tuple[bool, ...]:
        """True for each axis that closes to a ring.

        Args:
            torus_wrap: Shortest such axis (``LinkSpec.torus_wrap``).
        """
        return tuple(length >= max(3, torus_wrap or 1) for length in self.shape)

    def words(self) -> str:
        """Description in a few words."""
        return f"torus of {'x'.join(map(str, self.shape))} devices"

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        size, there = 1, cluster.ranks_per_node
        for axis in self.shape:
            size *= axis
        link, value = cluster.intra_link, str(list(self.shape))
        if self.node is not None:
            yield Problem(field=f"{_FIELD}.node", rule="devices of a torus have no other wiring", fix="remove it")
        if size != there:
            each = "a slice (devices_per_node)" if cluster.num_nodes > 1 else "the job"
            rule = f"makes {counted(size, 'device')}, and {each} has {there}"
            fix = f"use a shape such as {_shape(there, len(self.shape))}"
            if cluster.num_devices == size:
                fix += f", or devices_per_node: {size}: a slice is one node"
            yield Problem(field=f"{_FIELD}.shape", value=value, rule=rule, fix=fix)
        elif cluster.num_devices % there:
            rule = f"the {cluster.num_devices} devices of the job are no whole number of slices"
            yield Problem(field=f"{_FIELD}.shape", value=value, rule=rule, fix=f"use a multiple of {there} devices")
        elif link is not None and not link.torus_axes:
            rule = f"devices joined by {link.id} form no torus"
            fix = "name a link with torus_axes as intra_link, e.g. ici-tpu-v4, or use another kind"
            yield Problem(field=f"{_FIELD}.kind", value='"torus"', rule=rule, fix=fix)
        elif link is not None and link.torus_axes and len(self.shape) > link.torus_axes:
            rule = f"has more axes than the {link.torus_axes} of {link.id}"
            fix = f"use a shape such as {_shape(there, link.torus_axes)}"
            yield Problem(field=f"{_FIELD}.shape", value=value, rule=rule, fix=fix)


Inner = Annotated[Switch | LeafSpine | Rail | FatTree, Field(discriminator="kind")]


class Sites(_Topology):
    """Several sites, each with a network of its own, joined by slow links of long distance."""

    kind: Literal["sites"]
    nodes_per_site: NumDevices = Field(description="Nodes of a site.")
    gbit_per_site: Gbit = Field(description="Bandwidth between a site and all others in one direction, Gbit/s.")
    latency_s: Seconds | None = Field(
        None, description="Time from site to site, one way, in addition to that of the network of a site; needed."
    )
    window_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = Field(
        None,
        description=(
            "Bytes that two devices have in flight: they move at most so many per round trip. "
            "None for the buffers of NCCL's channels, or of a TCP connection of gloo."
        ),
    )
    inside: Inner | None = Field(
        None, description="Network of a site: switch, leaf_spine, rail or fat_tree; None for one switch."
    )

    def words(self) -> str:
        """Description in a few words."""
        apart = f", {format_time(self.latency_s)} apart" if self.latency_s else ""
        inside = f", each {self.inside.words()}" if self.inside is not None else ""
        text = f"sites of {counted(self.nodes_per_site, 'node')}, {self.gbit_per_site:g} Gbit/s per site{apart}{inside}"
        return _with_node(text, self)

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        yield from super().problems(cluster)
        if self.latency_s is None:
            rule = "is missing: sites are apart, and the round trip limits what a connection moves"
            fix = "give the time one way, about 5 us per km of fiber, e.g. latency_s: 0.01 for 2000 km"
            yield Problem(field=f"{_FIELD}.latency_s", rule=rule, fix=fix)
        if self.inside is None:
            return
        for name in ("node", "rate_per"):
            if getattr(self.inside, name) != _Topology.model_fields[name].default:
                fix = f"write {name} next to kind: sites"
                yield Problem(field=f"{_FIELD}.inside.{name}", rule="belongs to the whole topology", fix=fix)
        nodes = min(cluster.num_nodes, self.nodes_per_site)
        devices = min(cluster.num_devices, nodes * cluster.devices_per_node)
        for problem in self.inside.problems(cluster.model_copy(update={"num_devices": devices})):
            field = problem.field.replace(_FIELD, f"{_FIELD}.inside")
            yield Problem(field=field, value=problem.value, rule=problem.rule, fix=problem.fix)

    def num_links(self, cluster: ClusterSpec) -> int:
        """Upper bound on the directed links between nodes."""
        sites = -(-cluster.num_nodes // self.nodes_per_site)
        nodes = min(cluster.num_nodes, self.nodes_per_site)
        devices = min(cluster.num_devices, nodes * cluster.devices_per_node)
        site = cluster.model_copy(update={"num_devices": devices})
        of_site = super().num_links(site) if self.inside is None else self.inside.num_links(site)
        return sites * (4096 + of_site)


def _vertex_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError("must begin with a letter and have at most 60 letters, digits, dots, dashes and underscores")
    return name


_Vertex = Annotated[str, AfterValidator(_vertex_name)]


class GraphLink(Spec):
    """Cable of a graph: one link in each direction."""

    between: tuple[_Vertex, _Vertex] = Field(
        description="Both ends: node0 and so on for nodes, any other name for a switch."
    )
    gbit: Gbit = Field(description="Bandwidth in each direction, Gbit/s.")
    latency_s: Seconds = Field(0.0, description="Time in addition to the latency of the network (LinkSpec.latency_s).")


class Graph(_Hashing):
    """Any graph of nodes and switches. Flows take paths of the fewest links. Parallel cables are links of their own."""

    kind: Literal["graph"]
    routing: Routing = Field(
        "ecmp",
        description=(
            "ecmp, where the hash of a connection picks one of several such paths, or adaptive, where a flow is "
            "divided among them by bandwidth."
        ),
    )
    links: Annotated[tuple[GraphLink, ...], Field(min_length=1, max_length=20_000)] = Field(description="Cables.")

    def words(self) -> str:
        """Description in a few words."""
        switches = {name for link in self.links for name in link.between if node_of_name(name) is None}
        text = f"graph of {counted(len(self.links), 'cable')} and {counted(len(switches), 'switch')}"
        text += ", adaptive" if self.routing == "adaptive" else ""
        return _with_node(text.replace("switchs", "switches"), self)

    def problems(self, cluster: ClusterSpec) -> Iterator[Problem]:
        """Reasons why the cluster cannot have the topology."""
        yield from super().problems(cluster)
        yield from self._problems_of_seeds(self.routing)
        last = f"node{cluster.num_nodes - 1}"
        joined: dict[str, set[str]] = {}
        for index, link in enumerate(self.links):
            field, (first, second) = f"{_FIELD}.links.{index}.between", link.between
            value = f'["{first}", "{second}"]'
            if first == second:
                yield Problem(field=field, value=value, rule=f"joins {first} to itself", fix="name two ends")
            for name in link.between:
                node = node_of_name(name)
                if node is not None and node >= cluster.num_nodes:
                    rule = f"{name} is not in the cluster, whose nodes are node0 to {last}"
                    yield Problem(field=field, value=value, rule=rule, fix="use a node of the cluster, or more nodes")
            joined.setdefault(first, set()).add(second)
            joined.setdefault(second, set()).add(first)
        reached, rest = {"node0"}, ["node0"]
        while rest:
            new = joined.get(rest.pop(), set()) - reached
            reached |= new
            rest += new
        apart = [name for name in map("node{}".format, range(cluster.num_nodes)) if name not in reached]
        if cluster.num_nodes > 1 and apart:
            yield self._problem_of_unreachable(apart[0], len(apart), joined)

    def _problem_of_unreachable(self, name: str, number: int, joined: dict[str, set[str]]) -> Problem:
        more = f", as {'is 1 more node' if number == 2 else f'are {number - 1} more nodes'}" if number > 1 else ""
        if name in joined or "node0" not in joined:
            first = name if "node0" in joined else "node0"
            rule = f"{first} is not connected to {'node0' if first == name else 'the other nodes'}{more}"
            if "node0" not in joined:
                return Problem(field=f"{_FIELD}.links", rule="node0 is in no link", fix="add a link of node0")
            return Problem(field=f"{_FIELD}.links", rule=rule, fix=f"add a link that joins {name} and node0's switches")
        others = [key for key in joined if node_of_name(key) is None]
        near = did_you_mean(name, [key for key in others if key.lower().replace("-", "").startswith("node")])
        fix = near.replace("did you mean", "is it written") if near.startswith("did") else f"add a link of {name}"
        return Problem(field=f"{_FIELD}.links", rule=f"{name} is in no link{more}", fix=fix)


AnyTopology = Switch | LeafSpine | Rail | FatTree | Dragonfly | Torus | Sites | Graph
Topology = Annotated[AnyTopology, Field(discriminator="kind")]
TOPOLOGIES: dict[str, type[AnyTopology]] = {
    "switch": Switch,
    "leaf_spine": LeafSpine,
    "rail": Rail,
    "fat_tree": FatTree,
    "dragonfly": Dragonfly,
    "torus": Torus,
    "sites": Sites,
    "graph": Graph,
}
"""Kind -> its fields."""
INNER_KINDS = ("switch", "leaf_spine", "rail", "fat_tree")
"""Kinds of the network of one site."""


def hashed(topology: AnyTopology | None) -> LeafSpine | Rail | FatTree | Graph | None:
    """Topology, or the one inside each site, in which a hash decides about paths; None for none."""
    inside = topology.inside if isinstance(topology, Sites) else topology
    return inside if isinstance(inside, LeafSpine | Rail | FatTree | Graph) and inside.routing == "ecmp" else None


def with_seed(topology: AnyTopology, seed: int) -> AnyTopology:
    """The topology with another seed of its hash, and no range over seeds."""
    found = hashed(topology)
    if found is None:
        return topology
    other = found.model_copy(update={"seed": seed, "num_seeds": 1})
    return topology.model_copy(update={"inside": other}) if isinstance(topology, Sites) else other


def node_of_name(name: str) -> int | None:
    """Index of the node that an end of a graph's link names; None for a switch.

    >>> node_of_name("node12"), node_of_name("spine0")
    (12, None)
    """
    match = _NODE.fullmatch(name)
    return int(match[1]) if match else None


@lru_cache(maxsize=64)
def topology_problems(cluster: ClusterSpec) -> tuple[Problem, ...]:
    """Reasons why a cluster cannot have its topology; none without a topology."""
    topology = cluster.topology
    if topology is None:
        return ()
    problems = tuple(topology.problems(cluster))
    if not problems and (number := topology.num_links(cluster)) > MAX_LINKS:
        rule = f"makes up to {number:,} links, and at most {MAX_LINKS:,} are simulated"
        return (Problem(field=_FIELD, rule=rule, fix="use fewer switches or nodes"),)
    return problems


def _problems_of_hashing(topology: LeafSpine | Rail) -> Iterator[Problem]:
    if topology.hashes_flows and (topology.spines or 1) == 1:
        rule = "hashes flows over several spines"
        yield Problem(field=f"{_FIELD}.routing", value='"ecmp"', rule=rule, fix="give spines, e.g. spines: 4")


def _with_node(text: str, topology: _Topology) -> str:
    """Words of a topology with those of its routing and of its nodes."""
    if topology.hashes_flows:
        text += ", ECMP"
    pcie = topology.node
    if pcie is not None:
        switches = f" switches of {counted(pcie.devices_per_switch, 'device')}" if pcie.devices_per_switch else ""
        text += f"; PCIe{switches}{'' if pcie.peer_to_peer else ', no peer-to-peer'}"
    return text


def _quoted(topology: _Topology) -> str:
    return f'"{getattr(topology, "kind", "")}"'


def slice_shape(number: int, axes: int) -> tuple[int, ...]:
    """Shape of at most so many axes, as equal as possible: that of a slice with this number of devices.

    Cloud TPU names its slices so: v5litepod-32 is 4x8, v4-64 (32 chips of two cores) is 2x4x4.

    >>> slice_shape(32, 2), slice_shape(32, 3), slice_shape(256, 3), slice_shape(7, 2)
    ((4, 8), (2, 4, 4), (4, 8, 8), (1, 7))
    """
    if axes == 1:
        return (number,)
    side = round(number ** (1 / axes))
    first = next(size for size in range(max(1, side), 0, -1) if number % size == 0)
    return (first, *slice_shape(number // first, axes - 1))


def _shape(number: int, axes: int) -> str:
    return str(list(slice_shape(number, axes)))
