"""How the layers of a model are spread over the stages of a pipeline, with stages that are alike named once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
        counts: ``(parts, kinds)``: layers of each kind, in the order of ``Layers.distinct``.
    """

    number: int
    parts: tuple[Part, ...]
    part_of: NDArray[np.int64]
    placement: NDArray[np.int64]
    ranks: tuple[tuple[Part, ...], ...]
    kind_of: NDArray[np.int64]
    counts: NDArray[np.int64]

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

    def __init__(self, kinds: tuple[int, ...]) -> None:
        self._kinds = kinds
        self._distinct = sorted(set(kinds))
        self._first: dict[tuple[object, ...], Part] = {}
        self._known: dict[tuple[int, int, bool, bool], Part] = {}

    def get(self, start: int, stop: int, receives: bool, hands_on: bool) -> Part:
        """The first stage that was like this one, whose embedding and head are not together."""
        place = (start, stop, receives, hands_on)
        found = self._known.get(place)
        if found is None:
            alike = (self._kinds[start:stop], receives, hands_on)
            found = self._known[place] = self._first.setdefault(alike, Part(*place))
        return found

    def counts(self, part: Part) -> list[int]:
        """Layers of each kind."""
        of_part = self._kinds[part.start : part.stop]
        return [of_part.count(kind) for kind in self._distinct]


def layout_of(number: int, boundaries: Sequence[int], known: Parts, placement: Sequence[int]) -> Layout:
    """The stages of a split.

    Args:
        number: Its own.
        boundaries: Layers with which stages begin, and how many there are.
        known: Stages of the model's other layouts.
        placement: By stage, its rank.
    """
    parts: dict[Part, int] = {}
    index: list[int] = []
    of_rank: list[tuple[Part, ...]] = [()] * (max(placement) + 1)
    crosses = [False, *(one != other for one, other in pairwise(placement)), False]
    for stage, rank in enumerate(placement):
        part = known.get(boundaries[stage], boundaries[stage + 1], crosses[stage], crosses[stage + 1])
        index.append(parts.setdefault(part, len(parts)))
        of_rank[rank] += (part,)
    ranks = tuple(dict.fromkeys(of_rank))
    place_of = {parts_of_rank: place for place, parts_of_rank in enumerate(ranks)}
    kind_of = np.array([place_of[parts_of_rank] for parts_of_rank in of_rank])
    counts = np.array([known.counts(part) for part in parts])
    return Layout(number, tuple(parts), np.array(index), np.array(placement), ranks, kind_of, counts)
