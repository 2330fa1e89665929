"""How everything that happens to a stage of a pipeline changes the memory of its rank.

The order of what FSDP's hooks do is that of ``simplan.program.fsdp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Phase
from simplan.search.layer_changes import Change
from simplan.search.layers import Layers
from simplan.search.part import Part
from simplan.search.sharded_pass import UnitArrays
from simplan.search.sharding import ShardedStage
from simplan.search.stage_numbers import Walk, pass_bytes, pass_changes
from simplan.sim.pipeline.slots import NUM_SLOTS, Slot

__all__ = ["UnitBytes", "sharding_changes", "stage_changes"]

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
    layers: Layers, part: Part, begins: dict[int, UnitBytes] | None, *, split: bool, whole_in_weight: bool
) -> NDArray[np.int64]:
    """What a stage's computations do to memory, ``(slots, 2)``: at the worst moment, and after.

    Args:
        layers: The layers.
        part: The stage.
        begins: By layer with which a unit of FSDP begins, the unit; None without FSDP.
        split: Its backward is in two parts.
        whole_in_weight: Of which the second does all (the first stage's, under torch).
    """
    found = np.zeros((NUM_SLOTS, 2), np.int64)
    found[Slot.FORWARD] = pass_bytes(layers, part, Phase.FORWARD)
    widens = layers.state.gathered != layers.state.accumulated

    def write(slots: Sequence[Slot], phase: Phase, held: Held | None = None) -> None:
        found[list(slots)] = _with_hooks(layers, part, phase, begins or {}, held)

    if not split or whole_in_weight:
        backwards = _WEIGHTS if split else _BACKWARDS
        write(backwards, Phase.BACKWARD, Held(widens=widens))
        write(backwards[1:4:2], Phase.BACKWARD, Held(new=True, widens=widens))
        return found
    write(_INPUTS, Phase.BACKWARD_INPUT)
    write(_WEIGHTS, Phase.BACKWARD_WEIGHT)
    if widens:
        write([Slot.INPUT_WIDENS], Phase.BACKWARD_INPUT, Held(widens=True, frees=True))
        write([Slot.INPUT_WIDENS_FIRST], Phase.BACKWARD_INPUT, Held(new=True, widens=True, frees=True))
        write(_WEIGHTS[:4], Phase.BACKWARD_WEIGHT, Held(narrow=True))
    else:
        write([Slot.WEIGHT_FIRST, Slot.WEIGHT_ONLY], Phase.BACKWARD_WEIGHT, Held(new=True))
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
    walk = Walk()
    for gathered, cast in zip(units.gathered.tolist(), units.cast.tolist(), strict=True):
        walk.add(gathered + cast, gathered)
    found[Slot.UNSHARD] = walk.change
    found[Slot.SETTLE] = (units.gathered.max(), 0)
    found[Slot.RESHARD] = -units.gathered.sum()
    narrow = widens and split and not whole_in_weight
    found[Slot.REDUCE_GRAD] = _reduce(units, Held(widens=True, frees=True) if narrow else None, replicated)
    first = Held(new=True, widens=True, frees=True) if narrow else None
    found[Slot.REDUCE_GRAD_NARROW] = _reduce(units, first, replicated)
    return found


class UnitBytes(NamedTuple):
    """Gradients of a unit.

    Attributes:
        whole: As they come.
        accumulated: As they are added up.
    """

    whole: int
    accumulated: int


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


def _with_hooks(layers: Layers, part: Part, phase: Phase, begins: dict[int, UnitBytes], held: Held | None) -> Change:
    """A pass, and after each unit what becomes of its gradients."""
    walk = Walk()
    for run in pass_changes(layers, part, phase):
        unit = begins.get(run.layer)
        after = held.changes(unit) if held and unit else []
        walk.repeat([run.change, *after], run.num_layers)
    return walk.change


def _reduce(units: UnitArrays, held: Held | None, replicated: bool) -> Change:
    """REDUCE_GRAD, before which gradients of the last microbatch may have to be added to the others."""
    walk = Walk()
    buffer = outputs = 0
    columns = (units.scattered, units.output, units.gathered, units.accumulated, units.whole)
    for scattered, output, gathered, accumulated, whole in zip(*(c.tolist() for c in columns), strict=True):
        for change in held.changes(UnitBytes(whole, accumulated)) if held else ():
            walk.add(*change)
        changed = scattered - buffer - gathered
        walk.add(changed, changed - accumulated)
        buffer = scattered
        walk.add(output, output if replicated else 0)
        outputs += output if replicated else 0
    walk.add(-buffer - outputs, -buffer - outputs)
    return walk.change
