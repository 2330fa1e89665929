"""Folding: ranks that do the same at the same time are written out once.

Ranks with equal coordinates but for the pipeline axis form a column. Columns fold when everything that makes a rank's
list differ is equal for each of their ranks: the tiers that each of its groups spans, the neighbours it sends to, what
it owns of the optimizer states, and, in turn, the classes of the columns it meets in its groups (colour refinement).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import RankMapping

__all__ = ["Folding", "fold", "unfolded"]


@dataclass(frozen=True, slots=True)
class Folding:
    """Which ranks are written out.

    Attributes:
        stands_for: By rank, the rank that is written out in its place.
        ranks: The ranks that are written out, ascending.
    """

    stands_for: tuple[int, ...]
    ranks: tuple[int, ...]

    def members(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks written out that take part in what a group does together, ascending."""
        return tuple(sorted({self.stands_for[rank] for rank in group}))


def unfolded(mapping: RankMapping) -> Folding:
    """Every rank is written out."""
    ranks = tuple(range(mapping.world_size))
    return Folding(ranks, ranks)


def fold(mapping: RankMapping, node_of: Callable[[int], int], owns: Callable[[int], Hashable]) -> Folding:
    """Folds all columns that are alike.

    Args:
        mapping: Which rank sits where.
        node_of: Node of a rank.
        owns: Of a rank, what makes its work differ from that of others at the same stage.
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
    seen = [_spread(groups, nodes, width) for groups in kinds]

    def first_look(first: int) -> Hashable:
        column = mapping.pp_group(first)
        neighbours = tuple(node_of(a) == node_of(b) for a, b in zip(column, (*column[1:], column[0]), strict=True))
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
    """All groups of one kind, each once."""
    found: list[tuple[int, ...]] = []
    placed: set[int] = set()
    for rank in ranks:
        if rank not in placed:
            found.append(group_of(rank))
            placed.update(found[-1])
    return found


def _spread(groups: list[tuple[int, ...]], nodes: NDArray[np.int64], width: int) -> dict[int, int]:
    """By rank, a number for how many ranks its group has on each node, on every pipeline stage."""
    members = np.array(groups) + np.arange(0, len(nodes), width)[:, None, None]  # (stages, groups, ranks)
    on = np.sort(nodes[members], axis=-1)
    run = np.cumsum(np.diff(on, axis=-1, prepend=-1) != 0)  # number of the run of equal nodes
    sizes = np.sort(np.bincount(run)[run].reshape(on.shape), axis=-1)  # every rank with the ranks on its node
    return _by_member(groups, dict(zip(groups, map(bytes, sizes.swapaxes(0, 1)), strict=True)).__getitem__)


def _by_member(groups: list[tuple[int, ...]], fact: Callable[[tuple[int, ...]], Hashable]) -> dict[int, int]:
    """By rank, a number for a fact about its group; equal facts have equal numbers."""
    numbers = _numbered([fact(group) for group in groups])
    return {member: number for group, number in zip(groups, numbers, strict=True) for member in group}


def _members_in(classes: list[int]) -> Callable[[tuple[int, ...]], Hashable]:
    return lambda group: tuple(sorted(classes[member] for member in group))


def _numbered(values: Sequence[Hashable]) -> list[int]:
    """Equal values get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
