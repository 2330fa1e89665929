"""How everything that happens to a stage of a pipeline changes the memory of its rank.

The order of what FSDP's hooks do is that of ``simplan.program.fsdp``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Phase
from simplan.search.layer_changes import Change
from simplan.search.layers import Layers
from simplan.search.part import Part
from simplan.search.sharded_pass import UnitArrays
from simplan.search.sharding import ShardedStage, UnitBytes
from simplan.search.stage_numbers import Run, in_turn, pass_runs, walked
from simplan.sim.pipeline.slots import NUM_SLOTS, Slot

__all__ = ["sharding_changes", "stage_changes"]

_INPUTS = [Slot.INPUT, Slot.INPUT_WIDENS, Slot.INPUT_WIDENS_FIRST]
_BACKWARDS = [Slot.BACKWARD, Slot.BACKWARD_FIRST, Slot.BACKWARD_LAST, Slot.BACKWARD_ONLY]
_WEIGHTS = [
    Slot.WEIGHT,
    Slot.WEIGHT_FIRST,
    Slot.WEIGHT_LAST,
    Slot.WEIGHT_ONLY,
    Slot.WEIGHT_AGAIN,
    Slot.WEIGHT_AGAIN_LAST,
]


def stage_changes(
    layers: Layers, part: Part, units: dict[int, UnitBytes] | None, *, split: bool, whole_in_weight: bool
) -> NDArray[np.int64]:
    """What a stage's computations do to memory, ``(slots, 2)``: at the worst moment, and after.

    Args:
        layers: The layers.
        part: The stage.
        units: FSDP's, by the layer with which each begins; None without FSDP.
        split: Its backward is in two parts.
        whole_in_weight: Of which the second does all (the first stage's, under torch).
    """
    found = np.zeros((NUM_SLOTS, 2), np.int64)
    found[Slot.FORWARD] = walked(pass_runs(layers, part, Phase.FORWARD))
    widens = layers.state.gathered != layers.state.accumulated

    def write(slots: list[Slot], runs: list[Run], held: Held | None = None) -> None:
        found[slots] = walked(_with_hooks(runs, units, held) if units and held else runs)

    if not split or whole_in_weight:
        backwards = _WEIGHTS if split else _BACKWARDS
        runs = pass_runs(layers, part, Phase.BACKWARD)
        write(backwards, runs, Held(widens=widens))
        if units:
            write(backwards[1:4:2], runs, Held(new=True, widens=widens))
        return found
    inputs = pass_runs(layers, part, Phase.BACKWARD_INPUT)
    weights = pass_runs(layers, part, Phase.BACKWARD_WEIGHT)
    write(_INPUTS, inputs)
    write(_WEIGHTS, weights)
    if units and widens:
        write([Slot.INPUT_WIDENS], inputs, Held(widens=True, frees=True))
        write([Slot.INPUT_WIDENS_FIRST], inputs, Held(new=True, widens=True, frees=True))
        write(_WEIGHTS[:4], weights, Held(narrow=True))
    elif units:
        write([Slot.WEIGHT_FIRST, Slot.WEIGHT_ONLY], weights, Held(new=True))
    return found


def sharding_changes(
    sharded: ShardedStage, *, widens: bool, split: bool, whole_in_weight: bool, replicated: bool
) -> NDArray[np.int64]:
    """What FSDP does to memory at UNSHARD, RESHARD and REDUCE_GRAD, ``(slots, 2)``.

    Args:
        sharded: Units of the stage.
        widens: Gradients come in another precision than that in which they are added up.
        split, whole_in_weight: As of ``stage_changes``.
        replicated: Shards have replicas.
    """
    found = np.zeros((NUM_SLOTS, 2), np.int64)
    units = sharded.arrays
    gathers = zip(units.gathered.tolist(), units.cast.tolist(), strict=True)
    found[Slot.UNSHARD] = in_turn((gathered + cast, gathered) for gathered, cast in gathers)
    found[Slot.SETTLE] = (units.gathered.max(), 0)
    found[Slot.RESHARD] = -units.gathered.sum()
    narrow = widens and split and not whole_in_weight
    found[Slot.REDUCE_GRAD] = _reduce(units, Held(widens=True, frees=True) if narrow else None, replicated)
    first = Held(new=True, widens=True, frees=True) if narrow else None
    found[Slot.REDUCE_GRAD_NARROW] = _reduce(units, first, replicated)
    return found


class Held(NamedTuple):
    """What becomes of a unit's gradients.

    Attributes:
        new: Nothing was added up before.
        widens: They come in another precision.
        frees: They were held as they came, and are not any more.
        narrow: They stay as they came.
    """

    new: bool = False
    widens: bool = False
    frees: bool = False
    narrow: bool = False

    def changes(self, unit: UnitBytes) -> list[Change]:
        """Of memory."""
        if self.narrow:
            return [Change(unit.whole, unit.whole)]
        new = unit.accumulated if self.new else 0
        during = new + (unit.whole if self.widens else 0)
        found = [Change(during, new)] if during else []
        return [*found, Change(-unit.whole, -unit.whole)] if self.frees else found


def _with_hooks(runs: list[Run], units: dict[int, UnitBytes], held: Held) -> list[Run]:
    """The same, and after each layer with which a unit begins what becomes of the unit's gradients."""
    return [
        Run(layer, number, in_turn([change, *held.changes(units[layer])]) if layer in units else change)
        for layer, number, change in runs
    ]


def _reduce(units: UnitArrays, held: Held | None, replicated: bool) -> Change:
    """REDUCE_GRAD, before which gradients of the last microbatch may have to be added to the others."""
    changes: list[tuple[int, int]] = []
    buffer = outputs = 0
    columns = (units.scattered, units.output, units.gathered, units.accumulated, units.whole)
    for scattered, output, gathered, accumulated, whole in zip(*(c.tolist() for c in columns), strict=True):
        changes += held.changes(UnitBytes(whole, accumulated)) if held else ()
        changed = scattered - buffer - gathered
        changes.append((changed, changed - accumulated))
        buffer = scattered
        changes.append((output, output if replicated else 0))
        outputs += output if replicated else 0
    changes.append((-buffer - outputs, -buffer - outputs))
    return in_turn(changes)
