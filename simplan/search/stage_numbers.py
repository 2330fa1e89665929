"""Times and bytes of a stage: those of its layers, one after the other, layers that are alike taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simplan.program.program import Phase
from simplan.program.script import in_order
from simplan.search.layer_changes import Change
from simplan.search.layers import Layers
from simplan.search.part import Part

__all__ = ["Run", "Walk", "part_times", "pass_bytes", "pass_changes", "table_bytes"]

_NEVER = -(2**62)


class Run(NamedTuple):
    """Layers of a stage, one after the other, that are alike.

    Attributes:
        layer: One of them.
        num_layers: How many.
        change: What a pass through each does.
    """

    layer: int
    num_layers: int
    change: Change


class Walk:
    """Changes one after the other, as one."""

    def __init__(self) -> None:
        self._during = _NEVER
        self._held = 0

    def add(self, during: int, after: int) -> None:
        """One more."""
        self._during = max(self._during, self._held + during)
        self._held += after

    def repeat(self, changes: Sequence[Change], count: int) -> None:
        """The same changes so many times: as each time leaves as much, the first or the last time is the worst."""
        one = Walk()
        for change in changes:
            one.add(*change)
        during, after = one.change
        self.add(during, 0)
        self._held += (count - 1) * after
        self.add(during, after)

    @property
    def change(self) -> Change:
        """All of them; nothing at all changes nothing."""
        return Change(0 if self._during == _NEVER else self._during, self._held)


def part_times(layers: Layers, part: Part, phase: Phase, more_s: Sequence[float]) -> tuple[float, list[float]]:
    """A pass through a stage with something more after each layer's last computation.

    Args:
        layers: The layers.
        part: The stage.
        phase: Which pass.
        more_s: By layer of the stage.

    Returns:
        Its time, and by layer of the stage when its last computation has ended.
    """
    now_s, ended_s = 0.0, [0.0] * len(part.layers)
    for layer in in_order(part.layers, phase):
        position = layer - part.start
        passed = layers.passed(layer, phase, more_s[position])
        ended_s[position] = now_s + passed.computed_s
        now_s += passed.seconds
    return now_s, ended_s


def pass_changes(layers: Layers, part: Part, phase: Phase) -> list[Run]:
    """What a pass does to memory, in the order in which it comes to the layers.

    In a backward of two parts what layers keep to the end of the stage goes with the last layer, as
    ``simplan.program.script`` has it.
    """
    runs = layers.runs(part)
    if phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT):
        runs = runs[::-1]
    found, delayed = [], 0
    for i, count in runs:
        change, late = layers.change(i, part.ends(i), phase, tied=part.tied)
        found.append(Run(i, count, change))
        delayed += count * late
    if not delayed:
        return found
    last = found.pop()
    if last.num_layers > 1:
        found.append(last._replace(num_layers=last.num_layers - 1))
    found.append(Run(last.layer, 1, Change(last.change.during, last.change.after - delayed)))
    return found


def pass_bytes(layers: Layers, part: Part, phase: Phase) -> Change:
    """Memory of a pass through a stage without hooks between its layers."""
    walk = Walk()
    for run in pass_changes(layers, part, phase):
        walk.repeat([run.change], run.num_layers)
    return walk.change


def table_bytes(layers: Layers, part: Part) -> int:
    """Tables that the layers of a stage share, and those that each has."""
    kinds = [(layers.specs[i], count) for i, count in layers.kinds_in(part.start, part.stop)]
    shared = {table for layer, _ in kinds for table in layer.constants}
    tables = [*((table, 1) for table in shared), *((t, count) for layer, count in kinds for t in layer.buffers)]
    widths = layers.state.activation, layers.state.residual
    return sum(count * table.num_bytes(*widths) for table, count in tables)
