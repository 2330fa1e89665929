"""Completion of a table of compute actions with communication, FSDP's UNSHARDs, reductions and the optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal

from simplan.errors import ProgramError
from simplan.program.action import Action, ActionKind, Table

__all__ = ["Unshard", "complete_table", "input_of", "last_backwards", "stage_to_rank"]

Unshard = Literal["none", "once", "window"]
"""Stages of a rank that FSDP keeps unsharded.

``none`` adds no actions. ``once`` keeps each stage from the beginning to its last use. ``window`` keeps the next few
stages in use, as in torch."""

_F, _B, _I, _W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
_UNIT_TIME = {_F: 1, _B: 2, _I: 1, _W: 1}
_WINDOW = 3  # stages that torch keeps unsharded: one forward, one backward, one ahead


def stage_to_rank(table: Table) -> dict[int, int]:
    """Returns stage -> pipeline rank for every stage of the table.

    Raises:
        ProgramError: A stage is in two rows.
    """
    placement: dict[int, int] = {}
    for rank, row in enumerate(table):
        for action in row:
            if placement.setdefault(action.stage, rank) != rank:
                raise ProgramError(
                    f"action {action} is on rank {rank} but stage {action.stage} also has actions on rank "
                    f"{placement[action.stage]}: a stage belongs to one rank; move them to one row"
                )
    return placement


def last_backwards(table: Table) -> dict[int, Action]:
    """Returns stage -> action after which its gradients are complete: the last B or W of its row."""
    return {action.stage: action for row in table for action in row if action.kind in (_B, _W)}


def input_of(action: Action, num_stages: int) -> tuple[int, ActionKind, int | None] | None:
    """Returns the input of a compute action from a neighboring stage as ``(stage, F or B, microbatch)``; None for none.

    B stands for the input gradient, computed by a full backward or by a BACKWARD_INPUT.
    """
    stage, kind, microbatch = action
    if kind is _F:
        return (stage - 1, _F, microbatch) if stage > 0 else None
    if kind in (_B, _I):
        return (stage + 1, _B, microbatch) if stage + 1 < num_stages else None
    return None


def complete_table(compute: Table, *, unshard: Unshard = "none") -> Table:
    """Adds SEND, RECV, UNSHARD, RESHARD, REDUCE_GRAD and OPTIM to a table of F, B, I and W actions.

    A SEND follows the action that computes its data. The matching RECV is posted on the other rank when that action
    starts (with F = 1, B = 2, I = W = 1 units of time). This is early enough for overlap. The order is the same on both
    ends of every pair of ranks, as in-order transports such as NCCL require. Neighboring stages on one rank pass
    tensors directly. REDUCE_GRAD of a stage follows its last backward. Each row ends with one OPTIM, named after its
    first stage.

    Before every compute action a rank reshards stages that are no longer wanted, then unshards those wanted now. These
    are the next three different stages of its row, as in torch's ``_add_unshard_reshard``, or all stages still to come.

    Args:
        compute: The compute actions of every rank.
        unshard: Stages that FSDP keeps unsharded.

    Raises:
        ProgramError: The actions wait for each other in a cycle, or a stage is in two rows.
    """
    placement = stage_to_rank(compute)
    num_stages = len(placement)
    last = last_backwards(compute)
    sharding = [_sharding(row, unshard) for row in compute]
    rows = [list(actions[0]) for actions in sharding]
    position = [0] * len(compute)
    free_at = [0] * len(compute)
    made_at: dict[tuple[int, ActionKind, int | None], int] = {}
    waiting: dict[tuple[int, ActionKind, int | None], list[int]] = defaultdict(list)
    ready: list[tuple[int, int, int]] = []

    def offer(rank: int) -> None:
        """Queues the rank's next action if its input is available, or records the input that it waits for."""
        if position[rank] == len(compute[rank]):
            return
        needed = input_of(compute[rank][position[rank]], num_stages)
        if needed is not None and needed not in made_at:
            waiting[needed].append(rank)
            return
        stage, kind, _ = compute[rank][position[rank]]
        # of actions that start together, the one nearer to the source of the data first: its receiver can still post
        # the RECV before its own action
        depth = stage if kind is _F else num_stages - 1 - stage
        heappush(ready, (max(free_at[rank], made_at[needed] if needed else 0), depth, rank))

    for rank in range(len(compute)):
        offer(rank)
    while ready:
        start, _, rank = heappop(ready)
        action = compute[rank][position[rank]]
        position[rank] += 1
        free_at[rank] = start + _UNIT_TIME[action.kind]
        rows[rank].append(action)
        communication = _communication(action, num_stages, placement)
        if communication is not None:
            send, receive, peer = communication
            rows[rank].append(send)
            rows[peer].append(receive)
        if action == last.get(action.stage):
            rows[rank].append(Action(action.stage, ActionKind.REDUCE_GRAD))
        rows[rank] += sharding[rank][position[rank]]
        if action.kind is not _W:
            made = (action.stage, _F if action.kind is _F else _B, action.microbatch)
            made_at[made] = free_at[rank]
            for waiter in waiting.pop(made, ()):
                offer(waiter)
        offer(rank)
    stuck = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(compute) if position[r] < len(row)]
    if stuck:
        raise ProgramError(f"the actions wait for each other or for actions that never come: {', '.join(stuck)}")
    for row in rows:
        if row:
            row.append(Action(min(action.stage for action in row), ActionKind.OPTIM))
    return tuple(tuple(row) for row in rows)


def _sharding(row: Sequence[Action], unshard: Unshard) -> list[list[Action]]:
    """Returns the RESHARD and UNSHARD actions before each action of a row, and after the last one."""
    if unshard == "none":
        return [[] for _ in range(len(row) + 1)]
    most = _WINDOW if unshard == "window" else None
    gathered: list[int] = []
    found = []
    for coming in _coming_stages(row):
        wanted = coming[:most]
        evicted = [stage for stage in gathered if stage not in wanted]
        fetched = [stage for stage in wanted if stage not in gathered]
        gathered = [stage for stage in gathered if stage in wanted] + fetched
        found.append(
            [Action(stage, ActionKind.RESHARD) for stage in evicted]
            + [Action(stage, ActionKind.UNSHARD) for stage in fetched]
        )
    return found


def _coming_stages(row: Sequence[Action]) -> list[tuple[int, ...]]:
    """Returns, before each action of a row and after the last one, the stages still to come, by next use."""
    coming: list[tuple[int, ...]] = [()]
    for action in reversed(row):
        coming.append((action.stage, *(stage for stage in coming[-1] if stage != action.stage)))
    return coming[::-1]


def _communication(action: Action, num_stages: int, placement: dict[int, int]) -> tuple[Action, Action, int] | None:
    """Returns ``(SEND, RECV, receiving rank)`` for an action whose result another rank needs; None for any other."""
    stage, kind, microbatch = action
    if kind is _F and stage + 1 < num_stages:
        target, send, receive = stage + 1, ActionKind.SEND_F, ActionKind.RECV_F
    elif kind in (_B, _I) and stage > 0:
        target, send, receive = stage - 1, ActionKind.SEND_B, ActionKind.RECV_B
    else:
        return None
    peer = placement[target]
    if peer == placement[stage]:
        return None
    return Action(stage, send, microbatch), Action(target, receive, microbatch), peer
