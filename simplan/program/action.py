"""Pipeline actions and action tables, in torch's text form.

An action is one piece of work of a rank on a stage, usually for one microbatch. ``0F1`` is the forward of microbatch 1
on stage 0, ``2SEND_F3`` sends the output of stage 2, ``1REDUCE_GRAD`` reduces the gradients of stage 1. An action table
has one tuple of actions per pipeline rank, in the order in which the rank's CPU issues them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from simplan.errors import ProgramError


class ActionKind(StrEnum):
    """Kinds of actions. All letters are torch's except OPTIM, which is simplan's."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OPTIM = "OPTIM"

    __hash__ = str.__hash__  # Enum's own is a function of Python, and actions are keys of large tables

    @property
    def is_compute(self) -> bool:
        """True for forward and for full or split backward."""
        return self in _COMPUTE

    @property
    def per_microbatch(self) -> bool:
        """True for kinds whose actions name a microbatch."""
        return self not in _PER_STAGE


_COMPUTE = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT})
_PER_STAGE = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD, ActionKind.OPTIM})
_RECEIVE = {
    ActionKind.FORWARD: ActionKind.RECV_F,
    ActionKind.BACKWARD: ActionKind.RECV_B,
    ActionKind.BACKWARD_INPUT: ActionKind.RECV_B,
}
_OTHER_END = {
    ActionKind.SEND_F: (ActionKind.RECV_F, 1),
    ActionKind.RECV_F: (ActionKind.SEND_F, -1),
    ActionKind.SEND_B: (ActionKind.RECV_B, -1),
    ActionKind.RECV_B: (ActionKind.SEND_B, 1),
}
_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward for the input",
    ActionKind.BACKWARD_WEIGHT: "backward for the weights",
    ActionKind.SEND_F: "sending the output",
    ActionKind.RECV_F: "receiving the input",
    ActionKind.SEND_B: "sending the gradient",
    ActionKind.RECV_B: "receiving the gradient",
    ActionKind.UNSHARD: "gathering the parameters",
    ActionKind.RESHARD: "freeing the gathered parameters",
    ActionKind.REDUCE_GRAD: "reduction of the gradients",
    ActionKind.OPTIM: "optimizer step",
}
_TEXT = re.compile(r"(\d{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|OPTIM|[FBIW])(\d{1,9})?")


class Action(NamedTuple):
    """One entry of an action table.

    Attributes:
        microbatch: Microbatch index; None for UNSHARD, RESHARD, REDUCE_GRAD and OPTIM.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def in_words(self) -> str:
        """Returns a description for readers who do not know the letters.

        >>> Action.parse("1F3").in_words(), Action.parse("0OPTIM").in_words()
        ('forward of microbatch 3, stage 1', 'optimizer step of stage 0')
        """
        what = _WORDS[self.kind]
        if self.microbatch is None:
            return f"{what} of stage {self.stage}"
        return f"{what} of microbatch {self.microbatch}, stage {self.stage}"

    @property
    def receive(self) -> Action | None:
        """RECV of the input of a compute action, where it comes from another rank; None for kinds without one."""
        kind = _RECEIVE.get(self.kind)
        return Action(self.stage, kind, self.microbatch) if kind else None

    @property
    def other_end(self) -> Action | None:
        """RECV of a SEND on the neighboring stage, or SEND of a RECV; None for other actions."""
        kind, step = _OTHER_END.get(self.kind, (None, 0))
        return Action(self.stage + step, kind, self.microbatch) if kind else None

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses torch's text form; the whole text must match.

        Raises:
            ProgramError: The text is not an action.

        >>> Action.parse("2SEND_F3")
        Action(stage=2, kind=<ActionKind.SEND_F: 'SEND_F'>, microbatch=3)
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ProgramError(
                f"action {text!r}: must be <stage><kind>[<microbatch>] with kind one of "
                f"{', '.join(kind.value for kind in ActionKind)}, e.g. 0F1 or 1REDUCE_GRAD"
            )
        stage, kind, microbatch = match.groups()
        action = cls(int(stage), ActionKind(kind), None if microbatch is None else int(microbatch))
        if action.kind.per_microbatch != (microbatch is not None):
            needs = "needs a microbatch index" if action.kind.per_microbatch else "takes no microbatch index"
            raise ProgramError(f"action {text!r}: {action.kind.value} {needs}")
        return action


Table = tuple[tuple[Action, ...], ...]
"""One tuple of actions per pipeline rank."""


def format_table(table: Table) -> list[list[str]]:
    """Returns the table as lists of strings, the form written to files."""
    return [[str(action) for action in row] for row in table]


def parse_table(rows: Sequence[Sequence[str]]) -> Table:
    """Parses a table in the form of ``format_table``; empty cells are skipped.

    Raises:
        ProgramError: A cell is not an action.
    """
    return tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows)
