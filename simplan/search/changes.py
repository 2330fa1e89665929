"""How everything that happens to a stage of a pipeline changes the memory of its rank.

The order of what FSDP's hooks do is that of ``simplan.program.fsdp``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simplan.program.footprint import layers_effects
from simplan.program.program import Phase
from simplan.program.script import in_order
from simplan.program.split_footprint import SplitFootprint, split_effects
from simplan.search.layers import Layers
from simplan.search.sharded_pass import UnitArrays
from simplan.search.sharding import ShardedStage
from simplan.search.stage_numbers import Change, Part, Walk, pass_bytes
from simplan.sim.pipeline.slots import NUM_SLOTS, Slot

__all__ = ["stage_changes"]

_INPUTS = (Slot.INPUT, Slot.INPUT_WIDENS, Slot.INPUT_WIDENS_FIRST)
_BACKWARDS = (Slot.BACKWARD, Slot.BACKWARD_FIRST, Slot.BACKWARD_LAST, Slot.BACKWARD_ONLY)
_WEIGHTS = (
    Slot.WEIGHT,
    Slot.WEIGHT_FIRST,
    Slot.WEIGHT_LAST,
    Slot.WEIGHT_ONLY,
    Slot.WEIGHT_AGAIN,
    Slot.WEIGHT_AGAIN_LAST,
)


def stage_changes(
    layers: Layers, part: Part, sharded: ShardedStage | None, *, split: bool, whole_in_weight: bool, replicated: bool
) -> NDArray[np.int64]:
    """Changes of memory, ``(slots, 2)``: at the worst moment, and after.

    Args:
        layers: The layers.
        part: The stage.
        sharded: Its units under FSDP.
        split: Its backward is in two parts.
        whole_in_weight: Of which the second does all (the first stage's, under torch).
        replicated: Shards have replicas.
    """
    found = np.zeros((NUM_SLOTS, 2), np.int64)
    found[Slot.FORWARD] = pass_bytes(layers, part, Phase.FORWARD)
    backwards = _WEIGHTS if split else _BACKWARDS
    divided = split and not whole_in_weight
    if divided:
        found[list(_INPUTS)] = pass_bytes(layers, part, Phase.BACKWARD_INPUT)
        found[list(_WEIGHTS)] = pass_bytes(layers, part, Phase.BACKWARD_WEIGHT)
    else:
        found[list(backwards)] = pass_bytes(layers, part, Phase.BACKWARD)
    if sharded is None:
        return found
    hooks = _Hooks(layers, part, sharded, replicated=replicated)
    found[Slot.UNSHARD] = hooks.unshard()
    found[Slot.SETTLE] = (int(sharded.arrays.gathered.max()), 0)
    found[Slot.RESHARD] = -int(sharded.arrays.gathered.sum())
    narrow = divided and hooks.widens
    found[Slot.REDUCE_GRAD] = hooks.reduce(narrow=narrow, first=False)
    found[Slot.REDUCE_GRAD_NARROW] = hooks.reduce(narrow=narrow, first=narrow)
    if not divided:
        found[list(backwards)] = hooks.backward(first=False)
        found[list(backwards[1:4:2])] = hooks.backward(first=True)
    elif hooks.widens:
        found[Slot.INPUT_WIDENS] = hooks.input(first=False)
        found[Slot.INPUT_WIDENS_FIRST] = hooks.input(first=True)
        found[list(_WEIGHTS[:4])] = hooks.weight(sharded.arrays.whole)
    else:
        found[[Slot.WEIGHT_FIRST, Slot.WEIGHT_ONLY]] = hooks.weight(sharded.arrays.accumulated)
    return found


class _Hooks:
    """FSDP's hooks in a pipeline.

    Attributes:
        widens: Gradients come in another precision than that in which they are added up.
    """

    def __init__(self, layers: Layers, part: Part, sharded: ShardedStage, *, replicated: bool) -> None:
        self._layers, self._part, self._replicated = layers, part, replicated
        self._units: UnitArrays = sharded.arrays
        self._begins = {part.start + unit.layers[0]: index for index, unit in enumerate(sharded.units)}
        self.widens = layers.state.gathered != layers.state.accumulated

    def unshard(self) -> Change:
        """All units are asked for."""
        walk = Walk()
        for gathered, cast in zip(self._units.gathered.tolist(), self._units.cast.tolist(), strict=True):
            walk.add(gathered + cast, gathered)
        return walk.change

    def backward(self, *, first: bool) -> Change:
        """Whole backward, after each unit of which its gradients are added up."""
        walk = Walk()
        for layer in in_order(self._part.layers, Phase.BACKWARD):
            footprint = self._layers.facts(layer, self._part.ends(layer), tied=self._part.tied).footprint
            walk.effects(layers_effects([footprint], forward=False))
            if layer in self._begins:
                self._hold(walk, self._begins[layer], first=first)
        return walk.change

    def input(self, *, first: bool) -> Change:
        """Gradients of activations, beside which those of weights of the microbatch before are added up."""
        walk = Walk()
        for layer, change in self._passes(Phase.BACKWARD_INPUT):
            walk.add(*change)
            if layer in self._begins:
                self._widen(walk, self._begins[layer], first=first)
        return walk.change

    def weight(self, held: NDArray[np.int64]) -> Change:
        """Gradients of weights, which stay as they are (by unit, so many bytes)."""
        walk = Walk()
        for layer, change in self._passes(Phase.BACKWARD_WEIGHT):
            walk.add(*change)
            if layer in self._begins:
                size = int(held[self._begins[layer]])
                walk.add(size, size)
        return walk.change

    def reduce(self, *, narrow: bool, first: bool) -> Change:
        """REDUCE_GRAD.

        Args:
            narrow: Gradients of the last microbatch have not been added up yet.
            first: Nor have those of any before it.
        """
        units, walk = self._units, Walk()
        buffer = outputs = 0
        for index in range(len(units.gathered)):
            if narrow:
                self._widen(walk, index, first=first)
            scattered, output = int(units.scattered[index]), int(units.output[index])
            change = scattered - buffer - int(units.gathered[index])
            walk.add(change, change - int(units.accumulated[index]))
            buffer = scattered
            held = output if self._replicated else 0
            walk.add(output, held)
            outputs += held
        walk.add(-buffer - outputs, -buffer - outputs)
        return walk.change

    def _hold(self, walk: Walk, index: int, *, first: bool) -> None:
        new = int(self._units.accumulated[index]) if first else 0
        during = new + (int(self._units.whole[index]) if self.widens else 0)
        if during:
            walk.add(during, new)

    def _widen(self, walk: Walk, index: int, *, first: bool) -> None:
        self._hold(walk, index, first=first)
        freed = -int(self._units.whole[index])
        walk.add(freed, freed)

    def _passes(self, phase: Phase) -> list[tuple[int, Change]]:
        """Part by part of a backward in two parts, layer by layer; what layers keep to the end of the stage goes last.

        As ``simplan.program.script`` writes them.
        """
        order = list(in_order(self._part.layers, phase))
        splits = [self._layers.facts(i, self._part.ends(i), tied=self._part.tied).split() for i in order]
        delayed = [_late(split, phase) for split in splits]
        found = []
        for layer, split, late in zip(order, splits, delayed, strict=True):
            walk = Walk()
            walk.effects(split_effects([split], phase))
            during, after = walk.change
            more = late if layer != order[-1] else late - sum(delayed)
            found.append((layer, Change(during, after + more)))
        return found


def _late(split: SplitFootprint, phase: Phase) -> int:
    if phase is Phase.BACKWARD_INPUT:
        return split.dropped + split.dropped_logits
    return split.between_activations - split.released + split.between_logits
