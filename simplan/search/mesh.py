"""Groups of a mesh on a cluster whose ranks are all alike, and what messages in them take."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Message
from simplan.search.candidate import Candidate
from simplan.search.prices import Prices
from simplan.spec.hardware import ClusterSpec
from simplan.spec.layer import CollectiveKind
from simplan.spec.plan import RankMapping

__all__ = ["Mesh", "is_even"]


def is_even(candidate: Candidate, cluster: ClusterSpec) -> bool:
    """Whether all ranks of a pipeline stage see the same cluster.

    They do where nodes are full and every axis of the mesh, with those inside of it, fills nodes or divides them: what
    is inside a node of one group then is so of all others.
    """
    per_node = cluster.devices_per_node
    if cluster.num_devices > per_node and cluster.num_devices % per_node:
        return False
    sizes = accumulate((candidate.tp, candidate.cp, candidate.dp_shard, candidate.dp_replicate, candidate.pp), mul)
    return all(size % per_node == 0 or per_node % size == 0 for size in sizes)


class Mesh:
    """The groups of the first rank of every pipeline stage.

    Args:
        candidate: Any with this mesh.
        cluster: Where it is.
        prices: Of messages; they are kept.
    """

    def __init__(self, candidate: Candidate, cluster: ClusterSpec, prices: Prices) -> None:
        self._priced_by, self._cluster = prices, cluster
        self._mapping = RankMapping(
            candidate.pp, candidate.dp_replicate, candidate.dp_shard, candidate.cp, candidate.tp, candidate.ep
        )
        self._prices: dict[tuple[str, CollectiveKind, int], float] = {}

    @cached_property
    def num_shards(self) -> int:
        """Ranks over which FSDP and ZeRO shard."""
        return self._mapping.dp_shard * self._mapping.cp

    def data_s(self, kind: CollectiveKind, num_bytes: int) -> float:
        """Seconds of a collective of the ranks that average gradients."""
        return self._priced("dp_group", kind, num_bytes)

    def shard_s(self, kind: CollectiveKind, num_bytes: int) -> float:
        """The same of those that shard."""
        return self._priced("shard_group", kind, num_bytes)

    def replicate_s(self, kind: CollectiveKind, num_bytes: int) -> float:
        """The same of those that hold the same shard."""
        return self._priced("replicate_group", kind, num_bytes)

    def tensor_s(self, kind: CollectiveKind, num_bytes: int) -> float:
        """The same of those that split layers."""
        return self._priced("tp_group", kind, num_bytes)

    def within_nodes(self, placement: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the first ranks of a pipeline rank and of the one after it in a placement share a node."""
        nodes = placement * self._mapping.ranks_per_stage // self._cluster.devices_per_node
        return np.asarray(nodes[1:] == nodes[:-1])

    def between_s(self, kind: CollectiveKind, num_bytes: int, *, same_node: bool) -> float:
        """Seconds of a message, or of a collective of two, between two pipeline ranks."""
        return self._priced("inside" if same_node else "across", kind, num_bytes)

    @cached_property
    def _groups(self) -> dict[str, tuple[int, ...]]:
        mapping = self._mapping
        makers = (mapping.dp_group, mapping.shard_group, mapping.replicate_group, mapping.tp_group)
        two = {"inside": (0, mapping.ranks_per_stage), "across": (0, self._cluster.devices_per_node)}
        return {maker.__name__: maker(0) for maker in makers} | two

    def _priced(self, group: str, kind: CollectiveKind, num_bytes: int) -> float:
        key = (group, kind, num_bytes)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._priced_by.mesh_message_s(Message(kind, num_bytes, self._groups[group]))
        return found
