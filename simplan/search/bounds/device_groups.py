"""Devices of the groups of a plan, as far as they make a difference to lower bounds on times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import lru_cache

from simplan.cluster.hardware import ClusterSpec
from simplan.plan.placement import Placement
from simplan.plan.plan import GroupKind, ParallelPlan, RankMapping

Groups = tuple[tuple[int, ...], ...]
"""Devices of groups of one kind: one group for each way in which the groups spread over nodes."""


def groups_of(plan: ParallelPlan, cluster: ClusterSpec, kind: GroupKind, node_group: int | None = None) -> Groups:
    """Devices of the groups of one kind; groups with the same spread over nodes count once.

    On equal nodes, a collective takes as long in every stage unless nodes hold different parts of its groups. A bound
    for any rank is then the time in the fastest of these groups.

    Args:
        kind: See ``GROUP_AXES``.
        node_group: Only groups with a device of this node group; None for all.
    """
    return _groups(RankMapping.of(plan), Placement.of(plan), cluster, kind, node_group)


@lru_cache(maxsize=4096)
def _groups(
    mapping: RankMapping, placement: Placement | None, cluster: ClusterSpec, kind: GroupKind, node_group: int | None
) -> Groups:
    if placement is None and _is_aligned(mapping, cluster):
        return (mapping.group(kind, 0),)
    groups: dict[Hashable, tuple[int, ...]] = {}
    seen: set[int] = set()
    for first in range(0, mapping.world_size, 1 if cluster.is_mixed else mapping.ranks_per_stage):
        if first not in seen:
            ranks = mapping.group(kind, first)
            seen.update(ranks)
            devices = ranks if placement is None else placement.devices_of(ranks)
            nodes = Counter((cluster.group_of(device), cluster.node_of(device)) for device in devices)
            if node_group is None or any(group == node_group for group, _ in nodes):
                groups.setdefault(tuple(sorted((group, size) for (group, _), size in nodes.items())), devices)
    return tuple(groups.values())


def _is_aligned(mapping: RankMapping, cluster: ClusterSpec) -> bool:
    """True if every stage begins with a node, or lies inside of one; and nodes are equal."""
    width, per_node = mapping.ranks_per_stage, cluster.devices_per_node
    return not cluster.is_mixed and (mapping.pp == 1 or width % per_node == 0 or per_node % width == 0)
