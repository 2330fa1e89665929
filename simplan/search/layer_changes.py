"""What a pass through one layer does to memory, all categories together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simplan.program.footprint import LayerFootprint, layers_effects
from simplan.program.program import MemoryEffect, Phase
from simplan.program.split_footprint import SplitFootprint, split_effects
from simplan.program.stage import LayerFacts

__all__ = ["Change", "footprint_change", "layer_change"]


class Change(NamedTuple):
    """Bytes more than before, at the worst moment of something and after it."""

    during: int
    after: int


def layer_change(facts: LayerFacts, phase: Phase) -> tuple[Change, int]:
    """A pass, and what it leaves until the whole stage is through: of a backward in two parts, some activations.

    Args:
        facts: Of the layer.
        phase: Which pass.
    """
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        return footprint_change(facts.footprint, phase), 0
    split = facts.split()
    during, after = _total(split_effects([split], phase))
    late = _late(split, phase)
    return Change(during, after + late), late


def footprint_change(footprint: LayerFootprint, phase: Phase) -> Change:
    """A whole forward or backward."""
    return _total(layers_effects([footprint], forward=phase is Phase.FORWARD))


def _total(effects: Iterable[MemoryEffect]) -> Change:
    during = after = 0
    for effect in effects:
        during += effect.during_bytes
        after += effect.after_bytes
    return Change(during, after)


def _late(split: SplitFootprint, phase: Phase) -> int:
    """Activations and logits of a layer that stay until its stage is done (``simplan.program.script``)."""
    if phase is Phase.BACKWARD_INPUT:
        return split.dropped + split.dropped_logits
    return split.between_activations - split.released + split.between_logits
