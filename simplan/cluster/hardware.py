"""Hardware of a plan: devices, links and the cluster that they form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from simplan.base import MAX_DEVICES, Count, Line, NonNegative, NumDevices, Rate, Seconds, Spec
from simplan.cluster.topology import Topology, node_of_name
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.software.rates import KernelRates
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSpec
from simplan.units import MIB, counted, format_percent

Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int8"]
HostBytes = Annotated[int, Field(ge=1, le=10**15)]
"""Memory of one node; a rack that is one NVLink domain exceeds the limit of a ``Count``."""
_Part = Annotated[float, Field(gt=0, le=1)]


class DeviceSpec(Spec):
    """One accelerator (or, on a CPU, one rank's share of the machine).

    Attributes:
        id: Catalog name, e.g. ``h100-sxm-80gb``.
        kind: Device kind. ``cpu`` devices have no kernels in flight: host and compute are one, and ranks share the
            cores.
        memory_bytes: Capacity as the driver reports it; None when the sources do not say.
        memory_bandwidth_bytes_per_s: Datasheet bandwidth of the device memory.
        peak_flop_per_s: Dense peak (no sparsity) by dtype.
        matmul_flop_per_s: Best measured matmul rate by dtype, where published or calibrated.
        architecture: Name of the architecture in ``catalog/kernels.yaml``.
        num_sms: SMs over which GEMM tiles are distributed; None for devices without SMs, or unknown.
        kernels: Kernel efficiencies.
        intra_link: Name of the link that joins devices of one node; None for PCIe-less or unknown.
        host_link: Name of the link to host memory, separate for each device; None for unknown, or a CPU.
        sources: Field name -> source of its value.
        warning: Disagreement between the sources.
    """

    id: str
    kind: Literal["gpu", "tpu", "cpu", "other"] = "gpu"
    memory_bytes: Count | None = None
    memory_bandwidth_bytes_per_s: Rate | None = None
    peak_flop_per_s: dict[Dtype, Rate] = Field(default_factory=dict)
    matmul_flop_per_s: dict[Dtype, Rate] = Field(default_factory=dict)
    architecture: str = "other"
    num_sms: Count | None = None
    kernels: KernelRates = KernelRates()
    intra_link: str | None = None
    host_link: str | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    warning: str | None = None


class Spread(Spec):
    """Uncertainty of communication cost estimates: relative standard deviation by size.

    Attributes:
        small: Below 1 MiB, where latency counts.
        medium: Below 64 MiB.
        large: From 64 MiB on, where bandwidth counts.
    """

    small: NonNegative
    medium: NonNegative
    large: NonNegative

    def of(self, num_bytes: float) -> float:
        """Relative standard deviation for ``num_bytes``."""
        if num_bytes < MIB:
            return self.small
        return self.medium if num_bytes < 64 * MIB else self.large


class LinkSpec(Spec):
    """One network tier, and the efficiency of a collective library on it (``simplan.cost.communication``).

    Attributes:
        id: Catalog name, e.g. ``nvlink4``.
        bytes_per_s: Datasheet bandwidth in one direction, per device; for a torus, of one of a device's links.
        latency_s: Time of one step to a neighbor, with the protocol for large buffers (NCCL's Simple).
        bandwidth_share: Fraction of ``bytes_per_s`` that large buffers achieve.
        launch_s: Time from the start of a collective to its first byte, in addition to the library's own model.
        library: Library whose algorithms run: ``nccl`` (RCCL likewise), ``xla`` on a torus, or ``gloo`` between
            processes.
        switch_share: Fraction of ``bytes_per_s`` achieved when the switch reduces and multicasts (NVLink SHARP, NVLS);
            None without that feature.
        part_of_node: Fraction of ``bytes_per_s`` that a group can use where devices are wired without a switch, by
            devices per node and group size. A size that is not listed can use all.
        torus_axes: Axes of a torus, each with two links per device; None for a switch or direct links.
        torus_wrap: Shortest axis of a torus that closes to a ring; None for a switch or direct links.
        relative_std: Uncertainty of cost estimates.
        fitted_on: Measurements that constants were fitted on; None for priors.
        sources: Field name -> source of its value.
    """

    id: str
    bytes_per_s: Rate
    latency_s: Seconds
    bandwidth_share: _Part = 0.8
    launch_s: Seconds = 0.0
    library: Literal["nccl", "xla", "gloo"] = "nccl"
    switch_share: _Part | None = None
    part_of_node: dict[Count, dict[Count, _Part]] = Field(default_factory=dict)
    torus_axes: Annotated[int, Field(ge=1, le=3)] | None = None
    torus_wrap: Count | None = None
    relative_std: Spread = Spread(small=0.25, medium=0.25, large=0.25)
    fitted_on: str | None = None
    sources: dict[str, str] = Field(default_factory=dict)

    def rate_of_group(self, num_ranks: int, devices_per_node: int) -> float:
        """Bytes per second that each of ``num_ranks`` devices of a node achieves with large buffers."""
        part = self.part_of_node.get(devices_per_node, {}).get(num_ranks, 1.0)
        return self.bytes_per_s * self.bandwidth_share * part


def _node_name(name: str) -> str:
    if node_of_name(name) is None:
        raise ValueError("must be the name of a node, such as node0")
    return name


NodeName = Annotated[str, AfterValidator(_node_name)]
"""Name of a node: ``node0`` and so on."""


class BackgroundFlow(Spec):
    """Constant traffic of other jobs from one node to another, over all of their network cards.

    Attributes:
        source: Node that sends; the key is ``from``.
        destination: Node that receives; the key is ``to``.
        gbit: Gbit/s that it takes where links have room for it; of a full link it has its fair part.
    """

    source: NodeName = Field(alias="from")
    destination: NodeName = Field(alias="to")
    gbit: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]

    @property
    def nodes(self) -> tuple[int, int]:
        """Indices of both nodes."""
        return int(self.source.removeprefix("node")), int(self.destination.removeprefix("node"))


Slowdown = Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]


Nodes = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_DEVICES)], ...], Field(min_length=1)]
"""Nodes of the topology, numbered from 0."""


class BackgroundJob(Spec):
    """Another job, whose steps follow each other on the links of the topology while the predicted step runs.

    Attributes:
        name: Display name.
        model, training, plan, software: As in ``simplan.job.Job``; its nodes are like those of the cluster.
        nodes: Nodes of the topology that its ranks fill, in this order.
        offset_s: Seconds from the begin of one of its steps to that of the predicted step, modulo its step time alone.
    """

    name: Annotated[Line, Field(min_length=1, max_length=200)]
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec
    nodes: Nodes
    offset_s: Seconds = 0.0


class Straggler(Spec):
    """A rank, or all ranks of a node, whose kernels take longer than those of the others.

    Attributes:
        rank: Rank of the plan; None where a node is named.
        node: Node; None where a rank is named.
        slowdown: Time of its kernels over that of the others; 1 for none.
    """

    rank: Annotated[int, Field(ge=0, lt=MAX_DEVICES)] | None = None
    node: NodeName | None = None
    slowdown: Slowdown

    @property
    def words(self) -> str:
        """Description, e.g. ``rank 17, 1.3 times``."""
        who = f"rank {self.rank}" if self.node is None else self.node
        return f"{who}, {self.slowdown:g} times"


_Interval = Annotated[float, Field(ge=1e-4, le=3600, allow_inf_nan=False)]


class SlowLink(Spec):
    """A link of the topology with less bandwidth than its cable has, such as one with errors.

    Attributes:
        link: Name, such as ``leaf0 -> spine``.
        bandwidth_share: Fraction of its bandwidth that is left.
        slow_s: Seconds of each period for which the link is slow (a flapping link); None for always.
        period_s: Seconds from the begin of one slow time to that of the next; None for a link that is always slow.
        first_s: Seconds from the start of the step to the first slow time.
    """

    link: Annotated[str, Field(min_length=1, max_length=200)]
    bandwidth_share: _Part
    slow_s: _Interval | None = None
    period_s: _Interval | None = None
    first_s: Seconds = 0.0


RelativeStd = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Jitter(Spec):
    """Random variation of durations: every rank and action of a step has factors of its own, with mean 1.

    Attributes:
        distribution: Distribution of the factors; ``exponential`` is shifted, so that its mean is 1 at any deviation.
        compute_relative_std: Relative standard deviation of the time that the kernels of one action of a rank take.
        communication_relative_std: The same of the communications that one action of a rank starts.
        seed: Seed; equal seeds give equal steps.
    """

    distribution: Literal["lognormal", "normal", "exponential"] = "lognormal"
    compute_relative_std: RelativeStd = 0.0
    communication_relative_std: RelativeStd = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @property
    def words(self) -> str:
        """Description, e.g. ``lognormal, 2 % of compute``."""
        shares = {"compute": self.compute_relative_std, "communication": self.communication_relative_std}
        parts = [f"{format_percent(share)} of {name}" for name, share in shares.items() if share]
        return f"{self.distribution}, {' and '.join(parts) or '0 %'}"


class NodeGroup(Spec):
    """Equal nodes of a cluster that also has other nodes.

    Attributes:
        id: Catalog name, or ``inline``.
        num_nodes: Number of nodes, all of them full.
        device, intra_link, inter_link, host_link: See ``ClusterSpec``.
        host_memory_bytes, host_memory_bandwidth_bytes_per_s: See ``ClusterSpec``.
        price_per_device_hour: Price of one device for one hour, in any currency; None for that of the cluster.
    """

    id: str
    num_nodes: NumDevices
    device: DeviceSpec
    intra_link: LinkSpec | None = None
    inter_link: LinkSpec | None = None
    host_link: LinkSpec | None = None
    host_memory_bytes: HostBytes | None = None
    host_memory_bandwidth_bytes_per_s: Rate | None = None
    price_per_device_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class ClusterSpec(Spec):
    """A number of nodes: equal ones, or groups of equal ones (``node_groups``).

    Attributes:
        id: Catalog name, or ``inline``.
        device: Device of all nodes; with ``node_groups``, of the first group.
        devices_per_node: Devices in one ``intra_link`` domain; need not divide ``num_devices``.
        num_devices: All devices of the job; those of background jobs are further ones.
        intra_link: Link between devices of one node; None for a node of one device.
        inter_link: Link between nodes, with bandwidth per device; None for a single node.
        nics_per_node: Network cards of one node that ``inter_link`` stands for; None for unknown, or a single node.
        host_link: Link between each device and host memory; None for unknown, or a CPU.
        background: Other jobs on the links of ``topology``, or their traffic. The nodes of the topology are then those
            of all jobs, and this job has those that no other names.
        stragglers: Ranks that compute more slowly than the others.
        slow_links: Links of ``topology`` with less bandwidth than the others of their kind.
        jitter: Random variation of durations; None for none.
        host_memory_bytes: Host memory of one node; None for unknown, or a CPU.
        host_memory_bandwidth_bytes_per_s: Datasheet bandwidth of host memory, all sockets together; None for unknown.
        cores_per_node: CPU cores that the ranks of one node share; None for devices other than a CPU.
        source: Source of the composition.
        topology: Links and switches between nodes; None for two tiers without contention between flows.
        node_groups: Groups of different nodes, in the order of their devices; empty for equal nodes. The links of the
            cluster are then the slowest of these.
    """

    id: str
    device: DeviceSpec
    devices_per_node: NumDevices
    num_devices: NumDevices
    intra_link: LinkSpec | None = None
    inter_link: LinkSpec | None = None
    host_link: LinkSpec | None = None
    background: tuple[BackgroundFlow | BackgroundJob, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    jitter: Jitter | None = None
    host_memory_bytes: HostBytes | None = None
    host_memory_bandwidth_bytes_per_s: Rate | None = None
    cores_per_node: Count | None = None
    nics_per_node: Count | None = None
    source: str = ""
    topology: Topology | None = None
    node_groups: tuple[NodeGroup, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """True if the cluster has groups of different nodes."""
        return bool(self.node_groups)

    @property
    def devices_in_words(self) -> str:
        """Number and name of the devices, e.g. ``16 x h100-sxm-80gb + 16 x a100-sxm-80gb``."""
        if not self.node_groups:
            return f"{self.num_devices} x {self.device.id}"
        per_node = self.devices_per_node
        return " + ".join(f"{group.num_nodes * per_node} x {group.device.id}" for group in self.node_groups)

    def group_of(self, device: int) -> int:
        """Index of the node group of a device; 0 for a cluster of equal nodes."""
        node = self.node_of(device)
        for index, group in enumerate(self.node_groups):
            if node < group.num_nodes:
                return index
            node -= group.num_nodes
        return 0

    def device_of(self, device: int) -> DeviceSpec:
        """Specification of a device."""
        return self.node_groups[self.group_of(device)].device if self.node_groups else self.device

    @property
    def peak_flop_per_s(self) -> dict[Dtype, float]:
        """Sum of the dense peaks of all devices by dtype; a dtype without a peak on some device is left out."""
        if not self.node_groups:
            return {dtype: peak * self.num_devices for dtype, peak in self.device.peak_flop_per_s.items()}
        sizes = [(group.num_nodes * self.devices_per_node, group.device.peak_flop_per_s) for group in self.node_groups]
        common = set(sizes[0][1]).intersection(*(peaks for _, peaks in sizes))
        return {
            dtype: sum(number * peaks[dtype] for number, peaks in sizes) for dtype in sizes[0][1] if dtype in common
        }

    @property
    def largest_memory_bytes(self) -> int | None:
        """Memory of the device with the most; None if that of any device is unknown."""
        sizes = [group.device.memory_bytes for group in self.node_groups] or [self.device.memory_bytes]
        known = [size for size in sizes if size is not None]
        return max(known) if len(known) == len(sizes) else None

    def as_group(self, *groups: int) -> ClusterSpec:
        """The cluster as communications among some node groups see it: with the slowest links of these groups.

        For one group, this is a cluster of equal nodes like those of the group.
        """
        return _group_view(self, groups)

    @property
    def num_nodes(self) -> int:
        """Nodes of ``num_devices`` devices; the last one may not be full."""
        return -(-self.num_devices // self.devices_per_node)

    @property
    def nodes_in_words(self) -> str:
        """Number of nodes, with the devices of each if the last one is not full: ``2 nodes of 8 + 4 devices``."""
        last = self.num_devices % self.devices_per_node
        full = self.num_nodes - 1
        if not last or not full:
            return counted(self.num_nodes, "node")
        return f"{self.num_nodes} nodes of {f'{full} x ' * (full > 1)}{self.devices_per_node} + {last} devices"

    @property
    def ranks_per_node(self) -> int:
        """Devices of the job in a full node."""
        return min(self.devices_per_node, self.num_devices)

    @property
    def network_ports_per_node(self) -> int:
        """Network cards of a node that are told apart in a topology: at most one per device, which may be several."""
        return min(self.nics_per_node or self.devices_per_node, self.devices_per_node)

    @property
    def background_jobs(self) -> tuple[BackgroundJob, ...]:
        """Jobs of ``background``."""
        return tuple(each for each in self.background if isinstance(each, BackgroundJob))

    @property
    def background_flows(self) -> tuple[BackgroundFlow, ...]:
        """Constant traffic of ``background``."""
        return tuple(each for each in self.background if isinstance(each, BackgroundFlow))

    @property
    def num_fabric_nodes(self) -> int:
        """Nodes of the topology: those of the job and of all background jobs."""
        return self.num_nodes + sum(len(job.nodes) for job in self.background_jobs)

    @property
    def fabric_nodes(self) -> tuple[int, ...]:
        """Node of the topology of each node of the job: those that no background job names."""
        taken = {node for job in self.background_jobs for node in job.nodes}
        return tuple(node for node in range(self.num_fabric_nodes) if node not in taken)

    @property
    def fabric_cluster(self) -> ClusterSpec:
        """Cluster of all nodes of the topology, full ones if there are background jobs; without other jobs."""
        if not self.background_jobs:
            return self
        num_devices = self.num_fabric_nodes * self.devices_per_node
        return self.model_copy(update={"num_devices": num_devices, "background": ()})

    @property
    def links(self) -> dict[str, dict[str, Any] | None]:
        """Links of the job as JSON: name and datasheet bandwidth in one direction, bytes per second.

        Keys: ``intra_node``, None without a second device in a node, ``inter_node``, None for a single node, and
        ``topology`` if the cluster has one: its kind and a description.
        """
        found: dict[str, dict[str, Any] | None] = {"intra_node": None, "inter_node": None}
        if (intra := self.intra_link) is not None and self.ranks_per_node > 1:
            num_links = 2 * intra.torus_axes if intra.torus_axes else 1
            found["intra_node"] = {"name": intra.id, "bytes_per_s_per_device": num_links * intra.bytes_per_s}
        if (inter := self.inter_link) is not None and self.num_nodes > 1:
            found["inter_node"] = {
                "name": inter.id,
                "bytes_per_s_per_device": inter.bytes_per_s,
                "bytes_per_s_per_node": inter.bytes_per_s * self.devices_per_node,
                "nics_per_node": self.nics_per_node,
            }
        if self.topology is not None:
            found["topology"] = {"kind": self.topology.kind, "description": self.topology.words()}
        return found

    def node_of(self, device: int) -> int:
        """Node of a device; devices fill nodes in order. ``Job.node_of`` has the node of a rank."""
        return device // self.devices_per_node


def slowest_link(links: Sequence[LinkSpec | None]) -> LinkSpec | None:
    """The link over which large buffers take the longest; None if there is none.

    Ends of different speeds send at the rate of the slower one.
    """
    known = [link for link in links if link is not None]
    return min(known, key=lambda link: link.bytes_per_s * link.bandwidth_share, default=None)


@lru_cache(maxsize=128)
def _group_view(cluster: ClusterSpec, groups: tuple[int, ...]) -> ClusterSpec:
    """The cluster of ``ClusterSpec.as_group``; cached, because a search asks for it with every plan."""
    members = [cluster.node_groups[group] for group in groups]
    first = members[0]
    return cluster.model_copy(
        update={
            "device": first.device,
            "intra_link": slowest_link([group.intra_link for group in members]),
            "inter_link": slowest_link([group.inter_link for group in members]),
            "host_link": first.host_link,
            "host_memory_bytes": first.host_memory_bytes,
            "host_memory_bandwidth_bytes_per_s": first.host_memory_bandwidth_bytes_per_s,
            "node_groups": (),
        }
    )
