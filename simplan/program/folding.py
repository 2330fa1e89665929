"""Folding: ranks that do the same at the same time are written out once.

Ranks with equal coordinates but for the pipeline axis form a column. Columns fold when everything that makes a rank's
list differ is equal for each of their ranks: the tiers that each of its groups spans, the neighbours it sends to, what
it owns of the optimizer states, and, in turn, the classes of the columns it meets in its groups (colour refinement).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from simplan.spec.plan import RankMapping

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
    groups = [
        [group(first) for first in firsts] for group in (mapping.tp_group, mapping.shard_group, mapping.replicate_group)
    ]
    groups += [[group(first) for first in firsts] for group in (mapping.cp_group, mapping.dp_group)]

    def tier(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(Counter(node_of(rank) for rank in ranks).values()))

    def first_look(first: int) -> Hashable:
        column = mapping.pp_group(first)
        neighbours = tuple(node_of(a) == node_of(b) for a, b in zip(column, (*column[1:], column[0]), strict=True))
        tiers = tuple(
            tier(tuple(member + rank - first for member in kind[first])) for kind in groups for rank in column
        )
        return neighbours, tiers, tuple(owns(rank) for rank in column)

    classes = _numbered([first_look(first) for first in firsts])
    while True:
        met = [
            (classes[first], tuple(tuple(sorted(classes[member] for member in kind[first])) for kind in groups))
            for first in firsts
        ]
        refined = _numbered(met)
        if len(set(refined)) == len(set(classes)):
            break
        classes = refined
    leader: dict[int, int] = {}
    for first in firsts:
        leader.setdefault(classes[first], first)
    stands_for = tuple(rank - rank % width + leader[classes[rank % width]] for rank in range(mapping.world_size))
    return Folding(stands_for, tuple(sorted(set(stands_for))))


def _numbered(values: Sequence[Hashable]) -> list[int]:
    """Equal values get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
