"""What an event of a pipeline is to its stage: its kind and, where that changes what it takes, which of its kind."""

from __future__ import annotations

from enum import IntEnum

from simplan.program.action import ActionKind

__all__ = ["NUM_SLOTS", "Slot", "kind_of"]


class Slot(IntEnum):
    """Rows of the tables of durations and bytes.

    FIRST is the first backward (W where backward is split) of a stage, LAST the one that completes its gradients, ONLY
    both. Of a split backward also counts what lies between: FSDP holds the gradients of a W in the precision of the
    weights until the next I of the stage adds them to the others, so there are Is with a W since the I before
    (WIDENS; WIDENS_FIRST the first of them) and Ws without an I since the W before (AGAIN).
    RESHARD_REDUCED is a RESHARD of a stage that REDUCE_GRAD already resharded, REDUCE_GRAD_NARROW a REDUCE_GRAD of
    Ws of which no I has added any. SETTLE is no event: it is the part of a stage's first computation after UNSHARD
    that comes before the computation.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_FIRST = 2
    BACKWARD_LAST = 3
    BACKWARD_ONLY = 4
    INPUT = 5
    INPUT_WIDENS = 6
    INPUT_WIDENS_FIRST = 7
    WEIGHT = 8
    WEIGHT_FIRST = 9
    WEIGHT_LAST = 10
    WEIGHT_ONLY = 11
    WEIGHT_AGAIN = 12
    WEIGHT_AGAIN_LAST = 13
    UNSHARD = 14
    RESHARD = 15
    RESHARD_REDUCED = 16
    REDUCE_GRAD = 17
    REDUCE_GRAD_NARROW = 18
    OPTIM = 19
    SETTLE = 20


NUM_SLOTS = len(Slot)

_KINDS = (
    (Slot.FORWARD, ActionKind.FORWARD),
    (Slot.BACKWARD_ONLY, ActionKind.BACKWARD),
    (Slot.INPUT_WIDENS_FIRST, ActionKind.BACKWARD_INPUT),
    (Slot.WEIGHT_AGAIN_LAST, ActionKind.BACKWARD_WEIGHT),
    (Slot.UNSHARD, ActionKind.UNSHARD),
    (Slot.RESHARD_REDUCED, ActionKind.RESHARD),
    (Slot.REDUCE_GRAD_NARROW, ActionKind.REDUCE_GRAD),
    (Slot.OPTIM, ActionKind.OPTIM),
)


def kind_of(slot: int) -> ActionKind:
    """The kind of action of an event."""
    return next(kind for last, kind in _KINDS if slot <= last)
