"""Windows: bytes that two devices have in flight, which limit their bandwidth over a long distance.

A sender waits for acknowledgments, or for free buffers of the receiver, after so many bytes. So two devices move at
most a window per round trip: 8 MiB in 20 ms are 0.42 GB/s on a link of any bandwidth.

Sources: NVIDIA/nccl, src/init.cc (``DEFAULT_BUFFSIZE``, 4 MiB per channel of a collective; ``NCCL_P2P_NET_CHUNKSIZE``,
128 kB, of which ``NCCL_STEPS`` = 8 are in flight per channel of a send), src/graph/connect.cc (channels of the rings
found are doubled, so that a network card has two) and src/graph/paths.cc (two channels per peer over the network);
Linux, Documentation/networking/ip-sysctl (``tcp_wmem``: at most 4 MiB per TCP connection, of which gloo has one).
"""

from __future__ import annotations

import math

from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import Sites
from simplan.cost.communication.algorithm import Pattern
from simplan.units import MIB

CHANNELS = 2
"""Channels of NCCL between two network cards."""
_BUFFER_BYTES = 4 * MIB
_SEND_BYTES = 8 * 128 * 1024
_TCP_BYTES = 4 * MIB
_OF_SENDS = (Pattern.HOP, Pattern.PAIRWISE, Pattern.ONCE_PER_NODE, Pattern.HIERARCHICAL_ALL_TO_ALL)


def window_bytes(pattern: Pattern, cluster: ClusterSpec) -> float:
    """Bytes that two devices have in flight in one algorithm; infinite where it is not known (XLA)."""
    topology, link = cluster.topology, cluster.intra_link or cluster.inter_link
    if isinstance(topology, Sites) and topology.window_bytes is not None:
        return topology.window_bytes
    match link.library if link is not None else "nccl":
        case "gloo":
            return _TCP_BYTES
        case "nccl":
            return CHANNELS * (_SEND_BYTES if pattern in _OF_SENDS else _BUFFER_BYTES)
        case _:
            return math.inf
