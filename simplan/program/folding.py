"""Folding: ranks with identical work at identical times are simulated once.

Ranks whose coordinates differ only on the pipeline axis form a column. Two columns fold if all of these agree for each
of their ranks: the tiers that each group spans, the neighbors of its P2P sends, and its optimizer-state shards. With a
topology, tiers are nodes, leaf switches, pods and so on. The classes of the columns in each of its groups must agree as
well (color refinement).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import RankMapping


@dataclass(frozen=True, slots=True)
class Folding:
    """Assignment of every rank to the rank that is simulated for it.

    Attributes:
        stands_for: Per rank, the simulated rank that represents it.
        ranks: Simulated ranks, ascending.
    """

    stands_for: tuple[int, ...]
    ranks: tuple[int, ...]

    def members(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the simulated ranks that represent the members of a group, ascending."""
        return tuple(sorted({self.stands_for[rank] for rank in group}))


def unfolded(mapping: RankMapping) -> Folding:
    """Returns a folding in which every rank is simulated."""
    ranks = tuple(range(mapping.world_size))
    return Folding(ranks, ranks)


def fold(
    mapping: RankMapping,
    node_of: Callable[[int], int],
    owns: Callable[[int], Hashable],
    levels: Sequence[NDArray[np.int32]] = (),
) -> Folding:
    """Folds all equivalent columns.

    Args:
        mapping: Mesh of the ranks.
        node_of: Node of a rank.
        levels: ``(world_size,)`` Domains of the ranks on further levels of the network, such as leaf switches.
        owns: Per rank, a key for the optimizer states that it updates; columns fold only if their keys are equal.
    """
    width = mapping.ranks_per_stage
    firsts = range(width)  # ranks of the first pipeline stage stand for their columns
    kinds = [
        _groups(firsts, group)
        for group in (
            mapping.tp_group,
            mapping.shard_group,
            mapping.replicate_group,
            mapping.cp_group,
            mapping.dp_group,
            mapping.ep_group,
            mapping.etp_group,
            mapping.expert_group,
            mapping.expert_shard_group,
        )
    ]

    nodes = np.array([node_of(rank) for rank in range(mapping.world_size)])
    domains = [nodes, *levels]
    seen = [_spread(groups, domain, width) for domain in domains for groups in kinds]

    def first_look(first: int) -> Hashable:
        column = range(first, mapping.world_size, width)
        pairs = [*zip(column, (*column[1:], column[0]), strict=True)]
        neighbours = tuple(bool(domain[a] == domain[b]) for domain in domains for a, b in pairs)
        return neighbours, tuple(of[first] for of in seen), tuple(owns(rank) for rank in column)

    classes = _numbered([first_look(first) for first in firsts])
    while True:
        met = [_by_member(groups, _members_in(classes)) for groups in kinds]
        refined = _numbered([(classes[first], tuple(of[first] for of in met)) for first in firsts])
        if len(set(refined)) == len(set(classes)):
            break
        classes = refined
    leader: dict[int, int] = {}
    for first in firsts:
        leader.setdefault(classes[first], first)
    stands_for = tuple(rank - rank % width + leader[classes[rank % width]] for rank in range(mapping.world_size))
    return Folding(stands_for, tuple(sorted(set(stands_for))))


def _groups(ranks: range, group_of: Callable[[int], tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns all distinct groups of one kind."""
    found: list[tuple[int, ...]] = []
    placed: set[int] = set()
    for rank in ranks:
        if rank not in placed:
            found.append(group_of(rank))
            placed.update(found[-1])
    return found


def _spread(groups: list[tuple[int, ...]], nodes: NDArray[np.integer], width: int) -> dict[int, int]:
    """Returns a number per rank; equal numbers have equal counts of group members per node, on every pipeline stage."""
    members = np.array(groups) + np.arange(0, len(nodes), width)[:, None, None]  # (stages, groups, ranks)
    on = np.sort(nodes[members], axis=-1)
    run = np.cumsum(np.diff(on, axis=-1, prepend=-1) != 0)  # number of the run of equal nodes
    sizes = np.sort(np.bincount(run)[run].reshape(on.shape), axis=-1)  # every rank with the ranks on its node
    return _by_member(groups, dict(zip(groups, map(bytes, sizes.swapaxes(0, 1)), strict=True)).__getitem__)


def _by_member(groups: list[tuple[int, ...]], fact: Callable[[tuple[int, ...]], Hashable]) -> dict[int, int]:
    """Returns a number per rank for a fact about its group; equal facts get equal numbers."""
    numbers = _numbered([fact(group) for group in groups])
    return {member: number for group, number in zip(groups, numbers, strict=True) for member in group}


def _members_in(classes: list[int]) -> Callable[[tuple[int, ...]], Hashable]:
    return lambda group: tuple(sorted(classes[member] for member in group))


def _numbered(values: Sequence[Hashable]) -> list[int]:
    """Numbers the values; equal values get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
