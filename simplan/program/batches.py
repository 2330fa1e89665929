"""Messages of an interleaved schedule that go in batches, between a forward with its backward and the next ones.

Megatron-LM did so before it overlapped them (overlap_p2p_comm, May 2023): NVIDIA/Megatron-LM at 01fc083,
megatron/schedules.py, forward_backward_pipelining_with_interleaving, and p2p_communication.py, _communicate, which
waits for all four messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from simplan.program.action import Action, ActionKind
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec

__all__ = ["Waits", "in_batches", "waits_for"]

Waits = Literal["none", "each", "batch"]
"""For no message but what the next computation needs; for each that it sends or receives; for batches of them."""

_INTERLEAVED = "interleaved_1f1b"
_K = ActionKind
_SEND_OF = {_K.FORWARD: _K.SEND_F, _K.BACKWARD: _K.SEND_B}
_RECV_OF = {_K.FORWARD: _K.RECV_F, _K.BACKWARD: _K.RECV_B}
_MESSAGES = frozenset((*_SEND_OF.values(), *_RECV_OF.values()))


def waits_for(plan: ParallelPlan, software: SoftwareSpec, num_microbatches: int) -> Waits:
    """What a pipeline rank waits for before it goes on.

    Ranks are in step with batches where there are whole rounds of microbatches, and more than one. With others they
    would not be, and nobody waits.
    """
    if plan.schedule not in software.synchronous_schedules:
        return "none"
    if plan.schedule != _INTERLEAVED:
        return "each"
    return "batch" if num_microbatches > plan.pp and not num_microbatches % plan.pp else "none"


def in_batches(row: Sequence[Action]) -> tuple[Action, ...]:
    """The row of a pipeline rank, with messages where its host waits for them.

    A rank computes one forward before its first backward, a forward and a backward in turn, then backwards. After each
    of these it sends what they made and receives what the next ones need, all in one batch.

    Args:
        row: A complete row of whole backwards.
    """
    messages = {action for action in row if action.kind in _MESSAGES}
    found: list[Action] = []
    made: list[Action] = []
    rest: list[Action] = []
    for unit, following in _units([action for action in row if action.kind not in _MESSAGES]):
        needed = [Action(a.stage, _RECV_OF[a.kind], a.microbatch) for a in unit]
        found += [*(action for action in (*made, *needed) if action in messages), *rest, *unit]
        made = [Action(a.stage, _SEND_OF[a.kind], a.microbatch) for a in unit]
        rest = following
    return (*found, *(action for action in made if action in messages), *rest)


def _units(row: Sequence[Action]) -> Iterator[tuple[list[Action], list[Action]]]:
    """What is computed between two batches, and what else follows it in the row.

    Computed are forwards alone, then with the backward that follows, then backwards alone.
    """
    unit: list[Action] = []
    following: list[Action] = []
    for action in row:
        if action.kind not in _SEND_OF:
            following.append(action)
            continue
        if unit and not ([a.kind for a in unit] == [_K.FORWARD] and action.kind is _K.BACKWARD):
            yield unit, following
            unit, following = [], []
        unit.append(action)
    yield unit, following
