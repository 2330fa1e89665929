"""The section ``cluster``, with its devices and links, of a scenario file.

It is a preset with overrides, or given inline::

    cluster: {preset: dgx-h100, num_devices: 12}
    cluster: {preset: this-machine, num_devices: 2}
    cluster: {preset: this-machine, num_devices: 4, num_nodes: 2, nic_gbit: 10}
    cluster:
      device: {preset: a100-sxm-80gb, memory_bytes: 60000000000}
      devices_per_node: 4
      intra_link: pcie4
      nics_per_node: 2
      nic_gbit: 100
      num_nodes: 2

The network is that of a node (``inter_link_gbit_per_node``, or ``nics_per_node`` and ``nic_gbit``), or of one of its
devices (``inter_link_gbit_per_device``): of the preset's kind, else InfiniBand or RoCE. ``inter_link`` names another
network, e.g. efa-400gbit, or tcp-10gbit for one Ethernet card per node. Between machines like this one it is Ethernet
with TCP. ``topology`` says how nodes are joined (``simplan.scenario.topologies``).

Nodes that differ are listed in groups, each with the keys of a cluster::

    cluster:
      nodes:
        - {preset: dgx-h100, num_nodes: 2}
        - {preset: dgx-a100-80gb, num_nodes: 2}
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from simplan import catalog
from simplan.base import MAX_DEVICES, Gbit, NumDevices, Rate, Spec
from simplan.cluster.hardware import (
    ClusterSpec,
    DeviceSpec,
    HostBytes,
    Jitter,
    LinkSpec,
    NodeGroup,
    SlowLink,
    Straggler,
    slowest_link,
)
from simplan.cluster.machine import THIS_MACHINE, this_machine
from simplan.documentation import documentation
from simplan.errors import SpecError
from simplan.problems import Path
from simplan.scenario.background import read_background
from simplan.scenario.collecting import Sections
from simplan.scenario.topologies import with_topology
from simplan.training import Price
from simplan.units import counted, format_flop_per_s

_PATH: Path = ("cluster", "device")
_ANY = "h100-sxm-80gb"  # base for reading the other fields if the device is unknown
_MIN_PLAUSIBLE: dict[str, tuple[float, str]] = {
    "memory_bytes": (1e6, "bytes: 80 GiB is 85899345920"),
    "memory_bandwidth_bytes_per_s": (1e8, "bytes per second: 3.35 TB/s is 3.35e12"),
    "peak_flop_per_s": (1e9, "FLOP per second: 989 TFLOP/s is 989e12"),
    "matmul_flop_per_s": (1e9, "FLOP per second: 795 TFLOP/s is 795e12"),
}
"""Lower bounds of plausible values, with their units: smaller numbers have the wrong unit."""


def read_device(sections: Sections, data: Any, default: DeviceSpec | None) -> DeviceSpec | None:
    """Device of the file; None, after recording the problems, when the description is invalid.

    Args:
        data: Value of ``cluster.device``.
        default: Device whose fields a mapping without ``preset`` overrides: the one of the cluster's preset.
    """
    if not isinstance(data, dict):
        return sections.look_up(_PATH, catalog.device, data)
    fields, before = {key: value for key, value in data.items() if key != "preset"}, sections.num_problems
    if "preset" in data:
        preset = sections.look_up((*_PATH, "preset"), catalog.device, data["preset"])
        default = preset or catalog.device(_ANY)
    if "architecture" in fields:
        sections.look_up((*_PATH, "architecture"), catalog.kernel_fields, fields["architecture"])
    if sections.num_problems > before:  # read the other fields nevertheless, to report their problems
        fields.pop("architecture", None)
    base = default.model_dump() if default else {"id": "inline"}
    device = sections.read(DeviceSpec, {**base, **_implied(fields, default), **fields}, _PATH)
    _refuse_implausible(sections, fields)
    if device is not None:
        _refuse_faster_than_peak(sections, device)
    link = base.get("host_link") if "host_link" not in fields else fields["host_link"]
    if isinstance(link, str):
        sections.look_up((*_PATH, "host_link"), catalog.link, link)
    return device if sections.num_problems == before else None


def _implied(fields: dict[str, Any], default: DeviceSpec | None) -> dict[str, Any]:
    """Fields that change with the given fields, and all sources."""
    implied: dict[str, Any] = {}
    sources = {} if default is None else default.sources
    if default is None or "architecture" in fields:
        of_kernels = catalog.kernel_fields(fields.get("architecture", "other"))
        sources = {key: source for key, source in sources.items() if not key.startswith("kernels.")}
        sources |= of_kernels["sources"]
        implied["kernels"] = of_kernels["kernels"]
    peak = fields.get("peak_flop_per_s")
    if default is not None and isinstance(peak, dict):
        before, measured = default.peak_flop_per_s, default.matmul_flop_per_s
        kept = {dtype: rate for dtype, rate in measured.items() if peak.get(dtype) == before.get(dtype)}
        implied["matmul_flop_per_s"] = kept
    return implied | {"sources": sources | dict.fromkeys(fields, "the scenario")}


def _refuse_implausible(sections: Sections, fields: dict[str, Any]) -> None:
    """Records a problem for each number below the range of real devices."""
    for field in _MIN_PLAUSIBLE.keys() & fields.keys():
        least, unit = _MIN_PLAUSIBLE[field]
        value = fields[field]
        for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < least:
                path = (*_PATH, field) if key is None else (*_PATH, field, key)
                sections.refuse(path, "is less than any device has", value=number, fix=f"write it in {unit}")


def _refuse_faster_than_peak(sections: Sections, device: DeviceSpec) -> None:
    """Records a problem for each measured matmul rate above the peak."""
    for dtype, rate in device.matmul_flop_per_s.items():
        peak = device.peak_flop_per_s.get(dtype)
        if peak is not None and rate > peak:
            rule = f"is more than the peak of {format_flop_per_s(peak)}"
            path = (*_PATH, "matmul_flop_per_s", dtype)
            sections.refuse(path, rule, value=rate, fix=f"measure again, or give peak_flop_per_s.{dtype} too")


class ClusterSection(Spec):
    """The section ``cluster`` as written; ``device``, ``topology``, ``background`` and links are read separately."""

    preset: Any = Field(None, description="a name of `simplan show clusters`; the other keys override its fields")
    nodes: Any = Field(
        None,
        description=(
            f"groups of different nodes ({documentation('how-to/mixed-devices')}), each a mapping with preset, "
            "num_nodes and other keys of this list"
        ),
    )
    device: Any = Field(
        None,
        description=f"a name of `simplan show devices`, or its datasheet ({documentation('how-to/devices')})",
    )
    devices_per_node: NumDevices | None = Field(None, description="without a preset: devices of a node")
    intra_link: Any = Field(
        None, description="link between devices of a node: a name of `simplan show links`, or a mapping"
    )
    inter_link: Any = Field(
        None,
        description=(
            "link of the network instead of a rate, e.g. efa-400gbit per device, tcp-10gbit for one card per node"
        ),
    )
    inter_link_gbit_per_device: Gbit | None = Field(
        None, description="network of a node divided by its devices, Gbit/s, instead of its cards"
    )
    inter_link_gbit_per_node: Gbit | None = Field(None, description="network of a node, Gbit/s, instead of its cards")
    nics_per_node: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="network cards of a node, which its devices share; default: the preset's, else 1"
    )
    nic_gbit: Gbit | None = Field(None, description="rate of one network card, Gbit/s: InfiniBand or RoCE")
    topology: Any = Field(
        None,
        description=(
            "how nodes are joined: a name of `simplan show topologies`, or kind and keys (`simplan show topology`)"
        ),
    )
    background: Any = Field(
        (),
        description=(
            "other jobs on the topology: constant rates, [{from: node0, to: node4, gbit: 100}], or jobs on nodes of "
            f"their own ({documentation('how-to/network')}), [{{nodes: [1, 3], offset_s: 0.1, job: {{model: ...}}}}]"
        ),
    )
    stragglers: tuple[Straggler, ...] = Field(
        (), description="ranks that compute more slowly: [{rank: 17, slowdown: 1.3}, {node: node2, slowdown: 1.1}]"
    )
    slow_links: tuple[SlowLink, ...] = Field(
        (),
        description=(
            "links of the topology: [{link: leaf0 -> spine, bandwidth_share: 0.5}]; flapping with slow_s and period_s"
        ),
    )
    jitter: Jitter | None = Field(
        None,
        description=(
            "random variation of durations: {compute_relative_std: 0.05, communication_relative_std: 0.1, seed: 1}"
        ),
    )
    host_memory_bytes: HostBytes | None = Field(None, description="host memory of a node, for offloading")
    host_memory_bandwidth_bytes_per_s: Rate | None = Field(
        None, description="host memory bandwidth of all sockets, for updates on the CPU; default: 409.6e9"
    )
    num_nodes: NumDevices | None = Field(None, description="number of nodes; 1, or the nodes that num_devices needs")
    num_devices: NumDevices | None = Field(None, description="in place of num_nodes: devices, node by node")
    price_per_device_hour: Price | None = Field(
        None, description="price of one device for one hour in any currency, for the cost of training.num_tokens"
    )


_OF_WHOLE_CLUSTER = ("nodes", "topology", "background", "stragglers", "slow_links", "num_devices")
"""Keys that no group of nodes has."""
_BESIDE_NODES = ("nodes", "topology", "background", "slow_links", "stragglers", "price_per_device_hour")
"""Keys of a cluster that can be next to ``nodes``; the others are keys of the groups."""
_MAX_GROUPS = 100

_NETWORK_KEYS = (
    "inter_link",
    "inter_link_gbit_per_device",
    "inter_link_gbit_per_node",
    "nics_per_node",
    "nic_gbit",
)
"""Keys of the network between nodes."""


def read_cluster(sections: Sections, data: Any) -> ClusterSpec | None:
    """The section ``cluster``: ``preset`` with overrides, or inline; None, after recording problems, when invalid."""
    before = sections.num_problems
    section = (
        sections.read(ClusterSection, data, ("cluster",))
        if sections.is_mapping(data, ("cluster",), "dgx-h100")
        else None
    )
    cluster = None if section is None else _cluster(sections, section)
    return cluster if sections.num_problems == before else None


def _cluster(sections: Sections, section: ClusterSection) -> ClusterSpec | None:
    if section.nodes is not None:
        return _of_node_groups(sections, section)
    if section.preset == THIS_MACHINE:
        return _this_machine(sections, section)
    entry: catalog.NodeEntry | None = None
    if section.preset is not None:
        entry = sections.look_up(("cluster", "preset"), catalog.node, section.preset)
        if entry is None:
            return None
    elif section.device is None or (section.devices_per_node is None and section.num_devices != 1):
        key = "device" if section.device is None else "devices_per_node"
        fix = "give preset, or device and devices_per_node"
        if section.device is not None:
            read_device(sections, section.device, None)  # to report its problems as well
            nodes, devices = section.num_nodes or 1, section.num_devices
            if devices is not None and devices % nodes == 0:
                if_one = "" if nodes > 1 else " if they are in one node"
                fix = f"add devices_per_node: {devices // nodes}{if_one}"
        sections.refuse(("cluster", key), "is missing", fix=fix)
        return None
    device = entry.device if entry else None
    if section.device is not None:
        device = read_device(sections, section.device, device)
    if device is None:
        return None
    per_node = section.devices_per_node or (entry.devices_per_node if entry else 1)
    inter_link, nics_per_node = _inter_link(sections, section, entry, per_node)
    node = catalog.NodeEntry(
        id=entry.id if entry else "inline",
        device=device,
        devices_per_node=per_node,
        intra_link=_intra_link(sections, section, device, entry),
        inter_link=inter_link,
        nics_per_node=nics_per_node,
        source=entry.source if entry else "the scenario",
        host_memory_bytes=section.host_memory_bytes or (entry.host_memory_bytes if entry else None),
        host_memory_bandwidth_bytes_per_s=section.host_memory_bandwidth_bytes_per_s
        or (entry.host_memory_bandwidth_bytes_per_s if entry else None),
    )
    cluster = catalog.make_cluster(node, _num_devices(sections, section, per_node))
    return _with_network(sections, cluster, section)


def _of_node_groups(sections: Sections, section: ClusterSection) -> ClusterSpec | None:
    """Cluster of different nodes, which ``nodes`` lists in groups of equal ones."""
    listed = section.nodes
    if not isinstance(listed, list) or not listed:
        fix = "write [{preset: dgx-h100, num_nodes: 2}, {preset: dgx-a100-80gb, num_nodes: 2}]"
        if isinstance(listed, int) and not isinstance(listed, bool):
            fix = f"write num_nodes: {listed} for equal nodes"
        sections.refuse(("cluster", "nodes"), "must be a list of groups of equal nodes", value=listed, fix=fix)
        return None
    if len(listed) > _MAX_GROUPS:
        rule = f"has {len(listed)} groups; a cluster has at most {_MAX_GROUPS}"
        sections.refuse(("cluster", "nodes"), rule, fix="write equal nodes as one group, with num_nodes")
        return None
    misplaced = [name for name in section.model_fields_set if name not in _BESIDE_NODES]
    for name in sorted(misplaced):
        fix = "remove it" if name in _OF_WHOLE_CLUSTER else "write it in each group of nodes"
        sections.refuse(("cluster", name), "is a key of equal nodes", fix=fix)
    clusters = [_node_group(sections, place, data) for place, data in enumerate(listed)]
    groups = [group for group in clusters if group is not None]
    if misplaced or len(groups) < len(listed):
        return None
    (first, _), *others = groups
    for place, (other, _) in enumerate(others, 1):
        if other.devices_per_node != first.devices_per_node:
            rule = (
                f"has nodes of {counted(other.devices_per_node, 'device')}, and the first group has "
                f"{first.devices_per_node}; nodes of different sizes in one job are not modeled yet"
            )
            fix = f"write devices_per_node: {min(first.devices_per_node, other.devices_per_node)} in both groups"
            sections.refuse(("cluster", "nodes", place), rule, fix=fix)
        elif section.topology is not None and (unequal := _unequal_links(first, other)):
            rule = f"has another {unequal} than the first group; a topology of different links is not modeled yet"
            sections.refuse(("cluster", "nodes", place), rule, fix="remove topology, or write nodes with equal links")
    num_devices = sum(member.num_devices for member, _ in groups)
    if num_devices > MAX_DEVICES:
        rule = f"makes {num_devices:,} devices; a job has at most {MAX_DEVICES:,}"
        sections.refuse(("cluster", "nodes"), rule, fix="use fewer nodes")
        return None
    members = [member for member, _ in groups]
    memories = [member.host_memory_bytes for member in members]
    cluster = first.model_copy(
        update={
            "id": "+".join(dict.fromkeys(member.id for member in members)),
            "num_devices": num_devices,
            "intra_link": slowest_link([member.intra_link for member in members]),
            "inter_link": slowest_link([member.inter_link for member in members]),
            "host_link": None if None in [member.host_link for member in members] else first.host_link,
            "host_memory_bytes": None if None in memories else min(filter(None, memories)),
            "node_groups": tuple(
                NodeGroup(
                    **{name: getattr(member, name) for name in NodeGroup.model_fields if hasattr(member, name)}
                    | {"price_per_device_hour": price}
                )
                for member, price in groups
            ),
            "nics_per_node": None if section.topology is None else first.nics_per_node,
        }
    )
    return _with_network(sections, cluster, section)


def _unequal_links(first: ClusterSpec, other: ClusterSpec) -> str:
    """Key of the first difference in the links of two groups of nodes; empty for equal links."""
    keys = ("intra_link", "inter_link", "nics_per_node")
    return next((key for key in keys if getattr(first, key) != getattr(other, key)), "")


def _node_group(sections: Sections, place: int, data: Any) -> tuple[ClusterSpec, float | None] | None:
    """Equal nodes of one group as a cluster, and the price of a device and hour; None after recording problems."""
    before, path = sections.num_problems, ("cluster", "nodes", place)
    if not sections.is_mapping(data, path, "dgx-h100"):
        return None
    with sections.moved(("cluster",), path):
        section = sections.read(ClusterSection, data, ("cluster",))
        if section is None:
            return None
        for name in _OF_WHOLE_CLUSTER:
            if name in section.model_fields_set:
                fix = "write num_nodes" if name == "num_devices" else f"write it next to nodes, as cluster.{name}"
                sections.refuse(("cluster", name), "is no key of a group of nodes", fix=fix)
        if section.preset == THIS_MACHINE:
            rule = "cannot be one of several groups: this machine is one node"
            sections.refuse(("cluster", "preset"), rule, value=THIS_MACHINE, fix="name another preset")
        if sections.num_problems > before:
            return None
        # a node alone has no network, so each group is read as if it had a second node
        num_nodes = section.num_nodes or 1
        cluster = _cluster(sections, section.model_copy(update={"num_nodes": max(2, num_nodes)}))
    if cluster is None or sections.num_problems > before:
        return None
    cluster = cluster.model_copy(update={"num_devices": num_nodes * cluster.devices_per_node})
    return cluster, section.price_per_device_hour


def _with_network(sections: Sections, cluster: ClusterSpec, section: ClusterSection) -> ClusterSpec | None:
    """The cluster with its topology, the traffic of other jobs, slow ranks, slow links and jitter."""
    with_links = with_topology(sections, cluster, section.topology)
    changes: dict[str, Any] = {name: getattr(section, name) for name in ("stragglers", "slow_links", "jitter")}
    changes["background"] = read_background(sections, section.background)
    changes = {name: values for name, values in changes.items() if values}
    return with_links if with_links is None or not changes else with_links.with_changes(**changes)


def _this_machine(sections: Sections, section: ClusterSection) -> ClusterSpec | None:
    """CPU ranks of this machine, or its accelerators when the section names a device."""
    num_nodes = section.num_nodes or 1
    of_one = ("devices_per_node", "host_memory_bytes", "host_memory_bandwidth_bytes_per_s", "jitter")
    for key in of_one if num_nodes > 1 else (*of_one, *_NETWORK_KEYS, "topology", "background", "slow_links"):
        if getattr(section, key) not in (None, ()):
            rule = "has no meaning for this-machine" + ("" if num_nodes > 1 else ", which is one node")
            sections.refuse(("cluster", key), rule, fix="remove it")
            return None
    if section.device is not None:
        if num_nodes > 1:
            rule = "this-machine with a device of its own is one node"
            sections.refuse(("cluster", "num_nodes"), rule, value=num_nodes, fix="use 1, or a preset of many nodes")
            return None
        return _accelerators_here(sections, section)
    try:
        if num_nodes > 1:
            cluster = _machines_like_this(sections, section, num_nodes)
        else:
            cluster = catalog.cluster(THIS_MACHINE, section.num_devices)
    except SpecError as error:
        sections.keep(error, ("cluster", "num_devices"))
        return None
    if cluster is None:
        return None
    links = {"intra_link": _intra_link(sections, section, cluster.device, None)}
    return cluster.model_copy(update={**links, "stragglers": section.stragglers})


def _machines_like_this(sections: Sections, section: ClusterSection, num_nodes: int) -> ClusterSpec | None:
    """Several nodes like this one, joined by Ethernet."""
    ranks = section.num_devices or num_nodes
    if ranks % num_nodes:
        rule = f"must be a multiple of num_nodes = {num_nodes}, as all nodes run as many ranks"
        fix = f"use {ranks - ranks % num_nodes or num_nodes} or {ranks - ranks % num_nodes + num_nodes}"
        sections.refuse(("cluster", "num_devices"), rule, value=ranks, fix=fix)
        return None
    if all(getattr(section, key) is None for key in _NETWORK_KEYS):
        rule = "is needed to join several nodes"
        sections.refuse(("cluster", "nic_gbit"), rule, fix="give the Gbit/s of the network card of each node")
        return None
    inter_link, nics_per_node = _inter_link(sections, section, None, ranks // num_nodes, "tcp")
    cluster = this_machine(ranks, catalog.link("loopback"), num_nodes=num_nodes, inter_link=inter_link)
    cluster = cluster.model_copy(update={"nics_per_node": nics_per_node})
    return _with_network(sections, cluster, section)


def _accelerators_here(sections: Sections, section: ClusterSection) -> ClusterSpec | None:
    device = read_device(sections, section.device, None)
    if device is None:
        return None
    link, num_devices = _intra_link(sections, section, device, None), section.num_devices or 1
    node = catalog.NodeEntry(THIS_MACHINE, device, num_devices, link, None, "named in the scenario")
    return catalog.make_cluster(node, num_devices).with_changes(stragglers=section.stragglers)


def _intra_link(
    sections: Sections, section: ClusterSection, device: DeviceSpec, entry: catalog.NodeEntry | None
) -> LinkSpec | None:
    """The link between devices of a node."""
    if section.intra_link is not None:
        return _link(sections, ("cluster", "intra_link"), section.intra_link)
    if entry is not None and section.device is None:
        return entry.intra_link
    if device.intra_link is None:
        return None
    return sections.look_up(("cluster", "device"), catalog.link, device.intra_link)


def _inter_link(
    sections: Sections, section: ClusterSection, entry: catalog.NodeEntry | None, per_node: int, kind: str = "network"
) -> tuple[LinkSpec | None, int | None]:
    """The link between nodes, and the network cards of a node; None for unknown ones.

    Args:
        per_node: Devices of a node, which share its cards.
        kind: Network that a bandwidth in Gbit/s stands for.
    """
    rates = _network_rates(section, entry, per_node)
    if section.inter_link is not None:
        if rates:
            rule = f"is given twice, with {next(iter(rates))}"
            sections.refuse(("cluster", "inter_link"), rule, value=section.inter_link, fix="give one of the two")
            return None, None
        return _named_network(sections, section, per_node)
    if not rates:
        if section.nics_per_node is not None:
            fix = "give nic_gbit, the Gbit/s of one card"
            sections.refuse(("cluster", "nics_per_node"), "is given without the rate of a card", fix=fix)
        same = entry is not None and per_node == entry.devices_per_node
        return (entry.inter_link if entry else None), (entry.nics_per_node if entry and same else None)
    (first, gbit), *others = rates.items()
    for key, other in others:
        if abs(other - gbit) > 1e-9 * gbit:
            rule = f"is {other:g} Gbit/s per device, and {first} is {gbit:g}; a node has {counted(per_node, 'device')}"
            value = getattr(section, key)
            shown = int(value) if float(value).is_integer() else value
            sections.refuse(("cluster", key), rule, value=shown, fix="keep one of the two")
            return None, None
    preset = entry.nics_per_node if entry and "nic_gbit" in rates else None
    if entry is not None and entry.inter_link is not None:  # other cards of the same network
        kind = entry.inter_link.id.partition("-")[0]
    return catalog.network_link(gbit, kind), section.nics_per_node or preset or (1 if "nic_gbit" in rates else None)


def _network_rates(section: ClusterSection, entry: catalog.NodeEntry | None, per_node: int) -> dict[str, float]:
    """Gbit/s per device by the key that gives it."""
    rates = {}
    if section.inter_link_gbit_per_device is not None:
        rates["inter_link_gbit_per_device"] = section.inter_link_gbit_per_device
    if section.inter_link_gbit_per_node is not None:
        rates["inter_link_gbit_per_node"] = section.inter_link_gbit_per_node / per_node
    if section.nic_gbit is not None:
        cards = section.nics_per_node or (entry.nics_per_node if entry else None) or 1
        rates["nic_gbit"] = section.nic_gbit * cards / per_node
    elif section.nics_per_node and entry is not None and entry.nics_per_node and entry.inter_link is not None:
        node_gbit = entry.inter_link.bytes_per_s * 8e-9 * entry.devices_per_node
        rates["nics_per_node"] = node_gbit / entry.nics_per_node * section.nics_per_node / per_node
    return rates


def _named_network(sections: Sections, section: ClusterSection, per_node: int) -> tuple[LinkSpec | None, int | None]:
    """The link of ``inter_link``: of a device, or of one card per node."""
    name = section.inter_link
    if isinstance(name, str):
        cards = section.nics_per_node or 1
        shared = catalog.network_of_node(name, per_node, cards)
        if shared is not None:
            return shared, cards
    if section.nics_per_node is not None:
        rule = "is for links of one card per node, such as tcp-10gbit, and for nic_gbit"
        fix = "give nic_gbit in place of inter_link"
        sections.refuse(("cluster", "nics_per_node"), rule, value=section.nics_per_node, fix=fix)
        return None, None
    return _link(sections, ("cluster", "inter_link"), name), None


def _link(sections: Sections, path: Path, data: Any) -> LinkSpec | None:
    """Link from a catalog name or a mapping."""
    if not isinstance(data, dict):
        return sections.look_up(path, catalog.link, data)
    return sections.read(LinkSpec, {"id": "inline", **catalog.unmeasured_link(), **data}, path)


def _num_devices(sections: Sections, section: ClusterSection, per_node: int) -> int:
    """Devices of the job: as given, or full nodes, one without either."""
    nodes, devices = section.num_nodes, section.num_devices
    if nodes is not None and nodes * per_node > MAX_DEVICES + per_node:
        rule = f"makes {nodes * per_node:,} devices; a job has at most {MAX_DEVICES:,}"
        sections.refuse(("cluster", "num_nodes"), rule, value=nodes, fix=f"use {MAX_DEVICES // per_node:,} or less")
        return 1
    if nodes is None or devices is None:
        return devices or per_node * (nodes or 1)
    needed = -(-devices // per_node)
    if needed != nodes:
        rule = f"needs {counted(needed, 'node')} of devices_per_node = {per_node}, and num_nodes = {nodes}"
        fix = f"remove num_nodes for {counted(devices, 'device')}, or num_devices for {nodes * per_node}"
        if devices % nodes == 0:
            fix += f", or give devices_per_node: {devices // nodes}"
        sections.refuse(("cluster", "num_devices"), rule, value=devices, fix=fix)
    return devices
