"""Devices of the groups of a plan, as far as they make a difference to lower bounds on the time of collectives."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan, RankMapping

Groups = tuple[tuple[int, ...], ...]
"""Devices of groups of one kind: one group for each way in which the groups spread over nodes."""
LAYER_AXES = ("tp", "cp", "ep", "etp")
"""Axes of the collectives inside layers."""


def groups_of(plan: ParallelPlan, devices_per_node: int, kind: str) -> Groups:
    """Devices of the group of the first rank of every stage; groups with the same spread over nodes count once.

    A collective takes as long in every stage unless nodes hold different parts of its groups. A bound for any stage is
    then the time in the fastest of these groups.

    Args:
        kind: Name of the group in ``RankMapping``, e.g. ``shard``.
    """
    return _groups(RankMapping.of(plan), Placement.of(plan), devices_per_node, kind)


def spreads_alike(plan: ParallelPlan, devices_per_node: int) -> bool:
    """True if the groups of the first stage, on the devices of their own numbers, stand for those of all stages."""
    return plan.placement is None and _is_aligned(RankMapping.of(plan), devices_per_node)


@lru_cache(maxsize=4096)
def _groups(mapping: RankMapping, placement: Placement | None, devices_per_node: int, kind: str) -> Groups:
    group_of = getattr(mapping, f"{kind}_group")
    if placement is None and _is_aligned(mapping, devices_per_node):
        return (group_of(0),)
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for first in range(0, mapping.world_size, mapping.ranks_per_stage):
        ranks = group_of(first)
        devices = ranks if placement is None else placement.devices_of(ranks)
        spread = tuple(sorted(Counter(device // devices_per_node for device in devices).values()))
        found.setdefault(spread, devices)
    return tuple(found.values())


def _is_aligned(mapping: RankMapping, devices_per_node: int) -> bool:
    """True if every stage begins with a node, or lies inside of one."""
    width = mapping.ranks_per_stage
    return mapping.pp == 1 or width % devices_per_node == 0 or devices_per_node % width == 0
