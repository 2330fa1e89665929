"""Numbering of microbatches: kinds and stages of a row to its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from simplan.program.action import Action, ActionKind

__all__ = ["Step", "number_microbatches"]

Step = tuple[ActionKind, int]
"""Kind of action and stage; the action applies to the next microbatch in turn."""


def number_microbatches(steps: Iterable[Step], num_microbatches: int) -> tuple[Action, ...]:
    """Returns the steps with microbatches: each kind takes those of a stage in order; a B counts as an I and a W.

    Steps past the last microbatch are dropped. A table without deadlock stays so without them.
    """
    done: Counter[Step] = Counter()
    row = []
    for kind, stage in steps:
        parts = [kind]
        if kind is ActionKind.BACKWARD:
            parts = [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
        microbatch = done[parts[0], stage]
        done.update((part, stage) for part in parts)
        if microbatch < num_microbatches:
            row.append(Action(stage, kind, microbatch))
    return tuple(row)
