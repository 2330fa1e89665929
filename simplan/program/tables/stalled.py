"""Reasons why the rows of a table of compute actions cannot run to their ends."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.program.action import Action, ActionKind, Table

_F, _B, _I, _W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


def missing_actions(compute: Table) -> list[str]:
    """Returns a sentence for every F, B, I or W that a stage lacks, of all microbatches in the table."""
    found = {action for row in compute for action in row}
    microbatches = sorted({action.microbatch for action in found if action.microbatch is not None})
    expected = (
        Action(stage, kind, microbatch)
        for stage in range(1 + max(action.stage for action in found))
        for microbatch in microbatches
        for kind in (_F, *((_I, _W) if Action(stage, _I, microbatch) in found else (_B,)))
    )
    return [f"action {action} is missing" for action in expected if action not in found]


def misordered_actions(compute: Table) -> list[str]:
    """Returns a sentence for every backward before its forward and every W before its I."""
    return [sentence for row in compute for sentence in _misordered(row)]


def _misordered(row: tuple[Action, ...]) -> Iterator[str]:
    seen: set[Action] = set()
    for action in row:
        needed = {_B: _F, _I: _F, _W: _I}.get(action.kind)
        if needed is not None and action._replace(kind=needed) not in seen:
            yield f"action {action} comes before {action._replace(kind=needed)}"
        seen.add(action)
