"""Host of a device: time of copies to and from its pinned memory, and memory bandwidth of its CPU."""

from __future__ import annotations

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.model import CostEstimate, CostPart, Limit, Provenance
from simplan.program.program import HostCopy
from simplan.units import format_bytes, format_rate, format_time

HOST_LINK_EFFICIENCY = 0.8
"""Fraction of the datasheet bandwidth that copy engines achieve. NVIDIA's nvbandwidth (README at 04bf2869) prints 12.36
GB/s in one direction and 11.16 GB/s each in both simultaneously over PCIe 3 x16, 0.77 and 0.70 of the datasheet;
NVIDIA's article about nvbandwidth prints 55.63 GB/s over PCIe 5 x16, 0.88."""

HOST_MEMORY_EFFICIENCY = 0.75
"""Fraction of the datasheet bandwidth of host memory that the CPU achieves. STREAM achieves 0.73 to 0.79 of DDR4 (Texas
Instruments, SPRACV1B, AM6442). torch 2.13's fused AdamW is as fast as an addition of tensors: 44 and 38 GB/s on two
cores of an AMD EPYC (2026-11-25)."""

_NODE_BYTES_PER_S = 409.6e9
"""Default bandwidth of a node's memory: two sockets of eight channels of DDR4-3200 (AMD datasheet of EPYC 7742)."""

_RELATIVE_STD = 0.25


def host_memory_rate(cluster: ClusterSpec, *, whole_node: bool = False) -> float | None:
    """Returns the CPU's memory bytes per second per device, with all devices of a node active; None for CPUs.

    Assumes enough CPU threads: torchrun sets OMP_NUM_THREADS to 1 unless it is given.

    Args:
        whole_node: True for one process that has all of a node's bandwidth, such as a parameter server.
    """
    if cluster.device.kind == "cpu":
        return None
    node = cluster.host_memory_bandwidth_bytes_per_s or _NODE_BYTES_PER_S
    return node * HOST_MEMORY_EFFICIENCY / (1 if whole_node else cluster.ranks_per_node)


def host_copy_cost(copy: HostCopy, cluster: ClusterSpec) -> CostEstimate:
    """Estimates the time of a copy on a cluster whose devices each have a separate link to the host."""
    link = cluster.host_link
    assert link is not None, "checked by simplan.rules.sharding"
    rate = link.bytes_per_s * HOST_LINK_EFFICIENCY
    numbers = link.latency_s, copy.num_bytes, rate, link.id
    part = CostPart(link.id, link.latency_s + copy.num_bytes / rate, Limit.BANDWIDTH, _copy_words, numbers)
    return CostEstimate.of(part, Provenance.DATASHEET, _RELATIVE_STD)


def _copy_words(latency_s: float, num_bytes: int, bytes_per_s: float, link: str) -> str:
    moved = f"{format_bytes(num_bytes, digits=4)} / {format_rate(bytes_per_s, digits=4)}"
    return f"{format_time(latency_s, digits=4)} + {moved} ({link})"
