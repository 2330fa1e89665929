"""How the layers of a model are spread over the stages of a pipeline, with stages that are alike named once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.search.layers import Layers
from simplan.search.part import Part
from simplan.search.split import balanced_boundaries
from simplan.spec.schedules import Placement

__all__ = ["Crossings", "Layout", "layout_of", "placement_of"]


class Crossings(NamedTuple):
    """What goes from a stage to the next one for a microbatch.

    Attributes:
        sizes: Bytes of its tensors.
        made_bytes: Of those that were made in the stage.
    """

    sizes: tuple[int, ...]
    made_bytes: int


class Layout(NamedTuple):
    """Stages of a pipeline.

    Attributes:
        parts: Those that differ.
        part_of: By stage, which of them it is.
        places: By part, its stages.
        placement: By stage, its rank.
        ranks: Stages of a rank, for those ranks that differ.
        kind_of: By rank, which of them it is.
        crossings: By stage, what it sends on to another rank.
    """

    parts: tuple[Part, ...]
    part_of: NDArray[np.int64]
    places: tuple[NDArray[np.int64], ...]
    placement: tuple[int, ...]
    ranks: tuple[tuple[Part, ...], ...]
    kind_of: NDArray[np.int64]
    crossings: tuple[Crossings, ...]


def placement_of(kind: Placement, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """By stage, its rank."""
    num_stages = pp * virtual_stages
    if kind == "v":
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))


def layout_of(layers: Layers, placement: tuple[int, ...]) -> Layout:
    """The balanced split and its stages.

    Args:
        layers: The layers.
        placement: Of the stages.
    """
    num_stages = len(placement)
    boundaries = balanced_boundaries(layers.block_times_s, num_stages)
    seen: dict[tuple[object, ...], int] = {}
    parts: list[Part] = []
    index: list[int] = []
    crossed: list[Crossings] = []
    for stage in range(num_stages):
        start, stop = boundaries[stage], boundaries[stage + 1]
        receives = stage > 0 and placement[stage - 1] != placement[stage]
        hands_on = stage < num_stages - 1 and placement[stage + 1] != placement[stage]
        key = (tuple(layers.kinds[start:stop]), receives, hands_on)
        if key not in seen:
            seen[key] = len(parts)
            parts.append(Part(start, stop, receives, hands_on))
            leaving = layers.leaving(start, stop) if hands_on else ()
            made = sum(crossing.num_bytes for crossing in leaving if not crossing.passes)
            crossed.append(Crossings(tuple(crossing.num_bytes for crossing in leaving), made))
        index.append(seen[key])
    of_rank: list[tuple[Part, ...]] = [()] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        of_rank[rank] += (parts[index[stage]],)
    ranks = tuple(dict.fromkeys(of_rank))
    number_of = {parts_of_rank: number for number, parts_of_rank in enumerate(ranks)}
    kind_of = np.array([number_of[parts_of_rank] for parts_of_rank in of_rank])
    part_of = np.array(index)
    places = tuple(np.flatnonzero(part_of == number) for number in range(len(parts)))
    return Layout(tuple(parts), part_of, places, placement, ranks, kind_of, tuple(crossed[i] for i in index))
