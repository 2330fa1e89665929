"""Time of copies between a device and pinned memory of its host: latency plus bytes over bandwidth."""

from __future__ import annotations

from simplan.cost.base import Price, Provenance
from simplan.cost.collectives import send_s
from simplan.program.program import HostCopy
from simplan.spec.hardware import ClusterSpec
from simplan.units import format_bytes, format_rate, format_time

__all__ = ["HOST_LINK_EFFICIENCY", "host_copy_price"]

HOST_LINK_EFFICIENCY = 0.8
"""Share of the datasheet bandwidth that copy engines reach. NVIDIA's nvbandwidth (README at 04bf2869) prints 12.36 GB/s
one way and 11.16 GB/s each way at once over PCIe 3 x16, 0.77 and 0.70 of it; NVIDIA's article about it 55.63 GB/s over
PCIe 5 x16, 0.88."""

_RELATIVE_STD = 0.25


def host_copy_price(copy: HostCopy, cluster: ClusterSpec) -> Price:
    """Price on a cluster whose devices each have a link to the host of their own.

    Args:
        copy: What is copied.
        cluster: ``simplan.rules.offload`` has seen that it names the link.
    """
    link = cluster.host_link
    assert link is not None
    rate = link.bytes_per_s * HOST_LINK_EFFICIENCY
    formula = f"{format_time(link.latency_s)} + {format_bytes(copy.num_bytes)} / {format_rate(rate)} ({link.id})"
    return Price(send_s(copy.num_bytes, rate, link.latency_s), Provenance.DATASHEET, _RELATIVE_STD, formula)
