"""How the layers of a model are spread over the stages of a pipeline, with stages that are alike named once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.partition import balanced_assignment
from simplan.search.layers import Layers
from simplan.search.stage_numbers import Part
from simplan.spec.schedules import SCHEDULE_FACTS

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
        index: By stage, which of them it is.
        placement: By stage, its rank.
        rank_parts: By rank, its stages.
        crossings: By stage, what it sends on to another rank.
    """

    parts: tuple[Part, ...]
    index: NDArray[np.int64]
    placement: tuple[int, ...]
    rank_parts: tuple[tuple[Part, ...], ...]
    crossings: tuple[Crossings, ...]


def placement_of(schedule: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """By stage, its rank."""
    num_stages = pp * virtual_stages
    facts = SCHEDULE_FACTS.get(schedule)
    if facts is not None and facts.placement == "v":
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))


def layout_of(layers: Layers, placement: tuple[int, ...]) -> Layout:
    """The balanced split (``balanced_assignment``) and its stages.

    Args:
        layers: The layers.
        placement: Of the stages.
    """
    num_stages = len(placement)
    assignment = balanced_assignment(layers.block_times_s, num_stages)
    seen: dict[tuple[object, ...], int] = {}
    parts: list[Part] = []
    index: list[int] = []
    crossings: list[Crossings] = []
    for stage in range(num_stages):
        start, stop = assignment.boundaries[stage], assignment.boundaries[stage + 1]
        receives = stage > 0 and placement[stage - 1] != placement[stage]
        hands_on = stage < num_stages - 1 and placement[stage + 1] != placement[stage]
        key = (tuple(layers.kinds[start:stop]), receives, hands_on)
        if key not in seen:
            seen[key] = len(parts)
            parts.append(Part(start, stop, receives, hands_on))
        index.append(seen[key])
        leaving = layers.leaving(start, stop) if hands_on else ()
        made = sum(crossing.num_bytes for crossing in leaving if not crossing.passes)
        crossings.append(Crossings(tuple(crossing.num_bytes for crossing in leaving), made))
    rank_parts = tuple(
        tuple(parts[index[stage]] for stage in range(num_stages) if placement[stage] == rank)
        for rank in range(max(placement) + 1)
    )
    return Layout(tuple(parts), np.array(index), placement, rank_parts, tuple(crossings))
