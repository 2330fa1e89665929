"""Clusters with simple links, and groups of ranks on them."""

from __future__ import annotations

import math

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, DeviceSpec, LinkSpec
from simplan.cluster.topology import LeafSpine, Rail, Topology, Torus
from simplan.model.layer import CollectiveKind

GB = 10**9
US = 1e-6
NUM_LOCAL = 8
NUM_NODES = 7
INSIDE = LinkSpec(id="inside", bytes_per_s=400 * GB, latency_s=2 * US, bandwidth_share=0.8, switch_share=0.7)
BETWEEN = LinkSpec(id="between", bytes_per_s=50 * GB, latency_s=20 * US, bandwidth_share=0.9)
NO_SWITCH = INSIDE.model_copy(update={"switch_share": None})
SHARP = BETWEEN.model_copy(update={"switch_share": 0.85})
SHARDING = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
GLOO = LinkSpec(id="loop", bytes_per_s=4 * GB, latency_s=1e-4, bandwidth_share=0.5, library="gloo")
ETHERNET = LinkSpec(id="ethernet", bytes_per_s=GB, latency_s=2e-4, bandwidth_share=0.9, library="gloo")

NODES = ClusterSpec(
    id="test",
    device=DeviceSpec(id="d"),
    devices_per_node=NUM_LOCAL,
    num_devices=NUM_NODES * NUM_LOCAL,
    intra_link=INSIDE,
    inter_link=BETWEEN,
)
FABRICS = {
    "switch": NODES,
    "leaf_spine": NODES.model_copy(update={"topology": LeafSpine(kind="leaf_spine", nodes_per_leaf=4)}),
    "rail": NODES.model_copy(update={"topology": Rail(kind="rail", nodes_per_group=4)}),
}
HOSTS = NODES.model_copy(update={"intra_link": GLOO, "inter_link": ETHERNET, "nics_per_node": 1})


def torus(preset: str, shape: tuple[int, ...], num_slices: int = 1) -> ClusterSpec:
    """Slices of TPU chips."""
    size = math.prod(shape)
    return ClusterSpec(
        id="slices",
        device=DeviceSpec(id="chip", kind="tpu"),
        devices_per_node=size,
        num_devices=size * num_slices,
        intra_link=catalog.link(preset),
        inter_link=BETWEEN,
        topology=Torus(kind="torus", shape=shape),
    )


def group(num_nodes: int, num_local: int) -> tuple[int, ...]:
    """Equally many ranks on each node."""
    return tuple(NUM_LOCAL * node + place for node in range(num_nodes) for place in range(num_local))


def dgx_nodes(topology: Topology, num_nodes: int = 4) -> ClusterSpec:
    """Nodes of eight H100s on a topology."""
    return catalog.cluster("dgx-h100", 8 * num_nodes).model_copy(update={"topology": topology})
