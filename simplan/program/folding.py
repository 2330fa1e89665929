"""Folding: ranks with identical work at identical times are simulated once.

Ranks whose coordinates differ only on the pipeline axis form a column. Two columns fold if all of these agree for each
of their ranks: the tiers that each group spans, the neighbors of its P2P sends, and its optimizer-state shards. With a
topology, tiers are nodes, leaf switches, pods and so on. The classes of the columns in each of its groups must agree as
well (color refinement).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import STAGE_GROUPS, RankMapping, mesh_of


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
    mapping: RankMapping, domains: Sequence[NDArray[np.integer]], owns: Sequence[NDArray[np.generic]] = ()
) -> Folding:
    """Folds all equivalent columns.

    Args:
        mapping: Mesh of the ranks.
        domains: ``(world_size,)`` each. Domains of the ranks on the levels of the network: nodes, leaf switches and so
            on.
        owns: ``(world_size,)`` each. Properties of the ranks, such as the class of their optimizer states; columns fold
            only if they are equal.
    """
    shape = mapping.pp, mapping.ranks_per_stage
    kinds = _groups(mapping)
    facts = [np.unique(values, return_inverse=True)[1].reshape(shape) for values in owns]
    for domain in (each.reshape(shape) for each in domains):
        facts += [domain == np.roll(domain, -1, axis=0)]  # of neighboring stages
        facts += [_by_member(groups, _spread(groups, domain)) for groups in kinds]
    classes = _numbered(np.zeros(shape[1], np.int64), *facts)
    while True:
        met = [_by_member(groups, np.sort(classes[groups], axis=-1)) for groups in kinds]
        refined = _numbered(classes, *met)
        if refined.max() == classes.max():
            break
        classes = refined
    _, first, which = np.unique(classes, return_index=True, return_inverse=True)
    stages = np.arange(mapping.pp)[:, None] * shape[1]
    stands_for = (stages + first[which]).ravel().tolist()
    return Folding(tuple(stands_for), tuple((stages + np.sort(first)).ravel().tolist()))


def _groups(mapping: RankMapping) -> list[NDArray[np.integer]]:
    """Groups of several ranks of the first stage, ``(num_groups, num_members)`` for each kind, members ascending."""
    kinds = [_groups_of(*mesh_of(mapping, kind)) for kind in STAGE_GROUPS]
    return [*{(kind.shape[1], kind.tobytes()): kind for kind in kinds if kind.shape[1] > 1}.values()]


def _groups_of(sizes: Sequence[int], varies: Sequence[bool]) -> NDArray[np.integer]:
    """All groups along some axes of a mesh, in its first stage."""
    ranks = np.arange(math.prod(sizes[1:])).reshape(sizes[1:])
    inside = [axis for axis, free in enumerate(varies[1:]) if free]
    last = np.moveaxis(ranks, inside, range(-len(inside), 0))
    return last.reshape(-1, math.prod(last.shape[len(last.shape) - len(inside) :]))


def _spread(groups: NDArray[np.integer], domain: NDArray[np.integer]) -> NDArray[np.integer]:
    """Returns, per group, the sizes of its parts in one domain of ``(num_stages, width)``, on every pipeline stage."""
    on = np.sort(domain[:, groups], axis=-1)  # (stages, groups, ranks)
    run = np.cumsum(np.diff(on, axis=-1, prepend=-1) != 0)  # number of the run of ranks in one domain
    sizes = np.sort(np.bincount(run)[run].reshape(on.shape), axis=-1)  # every rank with the ranks in its domain
    return sizes.swapaxes(0, 1).reshape(len(groups), -1)


def _by_member(groups: NDArray[np.integer], facts: NDArray[np.integer]) -> NDArray[np.integer]:
    """Returns ``(width,)`` numbers of the facts of each rank's group, ``(num_groups, num_facts)``."""
    found = np.empty(groups.size, np.int64)
    found[groups] = _numbered(facts.T)[:, None]
    return found


def _numbered(*facts: NDArray[np.generic]) -> NDArray[np.integer]:
    """Numbers columns of facts; equal columns get equal numbers, from 0."""
    rows = np.ascontiguousarray(np.vstack(facts).T, np.int64)
    data, width = rows.tobytes(), rows.itemsize * rows.shape[1]
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(data[at : at + width], len(numbers)) for at in range(0, len(data), width)])
