"""Bytes of a stage: those of its layers, one after the other, layers that are alike taken together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simplan.program.program import Phase
from simplan.search.layer_changes import Change
from simplan.search.layers import Layers
from simplan.search.part import Part

__all__ = ["Run", "in_turn", "pass_runs", "walked"]

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


def in_turn(changes: Iterable[tuple[int, int]]) -> Change:
    """Changes one after the other, as one; nothing at all changes nothing."""
    worst, held = _NEVER, 0
    for during, after in changes:
        worst = max(worst, held + during)
        held += after
    return Change(0 if worst == _NEVER else worst, held)


def walked(runs: Iterable[Run]) -> Change:
    """Runs one after the other: as each layer of a run leaves as much, its first or its last one is the worst."""
    worst, held = _NEVER, 0
    for _, number, (during, after) in runs:
        last = held + (number - 1) * after
        worst = max(worst, held + during, last + during)
        held = last + after
    return Change(0 if worst == _NEVER else worst, held)


def pass_runs(layers: Layers, part: Part, phase: Phase) -> list[Run]:
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
