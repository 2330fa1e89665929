"""From the kinds and stages of a row to its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from simplan.program.action import Action, ActionKind

__all__ = ["Step", "number_microbatches"]

Step = tuple[ActionKind, int]
"""What a rank does to which stage, to the next microbatch in turn."""


def number_microbatches(steps: Iterable[Step], num_microbatches: int) -> tuple[Action, ...]:
    """The steps with their microbatches: each kind takes those of a stage in order, and a B counts as an I and a W.

    Steps past the last microbatch are left out: what remains of a table that is free of deadlock is so too.
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
