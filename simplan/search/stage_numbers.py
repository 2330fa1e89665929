"""Times and bytes of a stage: those of its layers, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simplan.program.footprint import layers_effects
from simplan.program.program import MemoryEffect, Phase
from simplan.program.script import in_order
from simplan.program.split_footprint import split_effects
from simplan.search.layers import Layers

__all__ = ["Change", "Part", "Walk", "part_times", "pass_bytes", "pass_s", "table_bytes"]

_NEVER = -(2**62)


class Part(NamedTuple):
    """A stage.

    Attributes:
        start, stop: Its layers.
        receives: Its input comes from another rank.
        hands_on: Its output goes to another rank, from which comes its gradient.
        tied: It has the embedding and the head, which share a weight.
    """

    start: int
    stop: int
    receives: bool = False
    hands_on: bool = False
    tied: bool = False

    @property
    def layers(self) -> range:
        """Indices of its layers."""
        return range(self.start, self.stop)

    def ends(self, layer: int) -> tuple[bool, bool]:
        """Whether the input, and the gradient of the output, of a layer come from other ranks."""
        return self.receives and layer == self.start, self.hands_on and layer == self.stop - 1


class Change(NamedTuple):
    """Bytes more than before, at the worst moment of something and after it."""

    during: int
    after: int


class Walk:
    """Changes one after the other, as one."""

    def __init__(self) -> None:
        self.during = _NEVER
        self.held = 0

    def add(self, during: int, after: int) -> None:
        """One more."""
        self.during = max(self.during, self.held + during)
        self.held += after

    def effects(self, effects: Iterable[MemoryEffect]) -> None:
        """One more, by category."""
        during = after = 0
        for effect in effects:
            during += effect.during_bytes
            after += effect.after_bytes
        self.add(during, after)

    @property
    def change(self) -> Change:
        """All of them; nothing at all changes nothing."""
        return Change(0 if self.during == _NEVER else self.during, self.held)


def pass_s(layers: Layers, part: Part, phase: Phase) -> float:
    """Time of a pass through a stage."""
    return sum(count * layers.passed(i, phase).seconds for i, count in layers.runs(part.start, part.stop))


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


def pass_bytes(layers: Layers, part: Part, phase: Phase) -> Change:
    """Memory of a pass through a stage without hooks between its layers."""
    facts = [layers.facts(i, part.ends(i), tied=part.tied) for i in in_order(part.layers, phase)]
    walk = Walk()
    if phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT):
        walk.effects(split_effects([fact.split() for fact in facts], phase))
    else:
        walk.effects(layers_effects([fact.footprint for fact in facts], forward=phase is Phase.FORWARD))
    return walk.change


def table_bytes(layers: Layers, part: Part) -> int:
    """Tables that the layers of a stage share, and those that each has."""
    runs = [(layers.specs[i], count) for i, count in layers.runs(part.start, part.stop)]
    shared = {table for layer, _ in runs for table in layer.constants}
    tables = [*((table, 1) for table in shared), *((t, count) for layer, count in runs for t in layer.buffers)]
    widths = layers.state.activation, layers.state.residual
    return sum(count * table.num_bytes(*widths) for table, count in tables)
