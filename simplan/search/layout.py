"""How the layers of a model are spread over the stages of a pipeline, with stages that are alike named once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.search.part import Part
from simplan.spec.schedules import Placement

__all__ = ["Layout", "Parts", "layout_of", "placement_of"]


class Layout(NamedTuple):
    """Stages of a pipeline.

    Attributes:
        number: Its own, among the layouts of a job.
        parts: Those that differ.
        part_of: By stage, which of them it is.
        placement: By stage, its rank.
        ranks: Stages of a rank, for those ranks that differ.
        kind_of: By rank, which of them it is.
    """

    number: int
    parts: tuple[Part, ...]
    part_of: NDArray[np.int64]
    placement: NDArray[np.int64]
    ranks: tuple[tuple[Part, ...], ...]
    kind_of: NDArray[np.int64]

    def by_rank(self, of_part: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums over the stages of every rank of what parts have; exact for integers up to 2^53."""
        found: NDArray[np.float64] = np.bincount(self.placement, of_part[self.part_of], len(self.kind_of))  # type: ignore[assignment] # weighted
        return found


def placement_of(kind: Placement, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """By stage, its rank."""
    num_stages = pp * virtual_stages
    if kind == "v":
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))


class Parts:
    """Stages of all layouts of one model; those that are alike are the same, so that they are priced once.

    Args:
        kinds: By layer, the number of the first one that is like it.
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        self._kinds = kinds
        self._first: dict[tuple[object, ...], Part] = {}

    def get(self, part: Part) -> Part:
        """The first stage that was like this one."""
        alike = tuple(self._kinds[part.start : part.stop]), *part[2:]
        return self._first.setdefault(alike, part)


def layout_of(number: int, boundaries: Sequence[int], known: Parts, placement: Sequence[int]) -> Layout:
    """The stages of a split.

    Args:
        number: Its own.
        boundaries: Layers with which stages begin, and how many there are.
        known: Stages of the model's other layouts.
        placement: By stage, its rank.
    """
    num_stages = len(placement)
    parts: dict[Part, int] = {}
    index: list[int] = []
    of_rank: list[tuple[Part, ...]] = [()] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        receives = stage > 0 and placement[stage - 1] != rank
        hands_on = stage < num_stages - 1 and placement[stage + 1] != rank
        part = known.get(Part(boundaries[stage], boundaries[stage + 1], receives, hands_on))
        index.append(parts.setdefault(part, len(parts)))
        of_rank[rank] += (part,)
    ranks = tuple(dict.fromkeys(of_rank))
    place_of = {parts_of_rank: place for place, parts_of_rank in enumerate(ranks)}
    kind_of = np.array([place_of[parts_of_rank] for parts_of_rank in of_rank])
    return Layout(number, tuple(parts), np.array(index), np.array(placement), ranks, kind_of)
