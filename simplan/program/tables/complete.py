"""Completion of a table of compute actions with communication, FSDP's UNSHARDs, reductions and the optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from simplan.errors import ProgramError
from simplan.program.action import Action, ActionKind, Table

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
_Result = tuple[int, ActionKind, int | None]
"""Stage, F or B, and microbatch; B stands for the input gradient of a full backward or of a BACKWARD_INPUT."""

_UNIT_TIME = {_F: 1, _B: 2, _I: 1, _W: 1}
_SHOWN = 10  # sentences of an error
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
                raise ProgramError(_misplaced(table, action.stage))
    return placement


def _misplaced(table: Table, stage: int) -> str:
    """Returns a sentence about the first action of a stage that is not on the rank with most actions of the stage."""
    ranks = [(rank, action) for rank, row in enumerate(table) for action in row if action.stage == stage]
    [(home, _)] = Counter(rank for rank, _ in ranks).most_common(1)
    rank, action = next((rank, action) for rank, action in ranks if rank != home)
    return (
        f"action {action} is on rank {rank} but stage {stage} has most actions on rank {home}: "
        "a stage belongs to one rank; move it there"
    )


def last_backwards(table: Table) -> dict[int, Action]:
    """Returns stage -> action after which its gradients are complete: the last B or W of its row."""
    return {action.stage: action for row in table for action in row if action.kind in (_B, _W)}


def input_of(action: Action, num_stages: int) -> _Result | None:
    """Returns the input of a compute action from a neighboring stage; None for none."""
    stage, kind, microbatch = action
    if kind is _F:
        return (stage - 1, _F, microbatch) if stage > 0 else None
    if kind in (_B, _I):
        return (stage + 1, _B, microbatch) if stage + 1 < num_stages else None
    return None


class RanAction(NamedTuple):
    """A compute action with its start and end, in the unit of the durations, and its pipeline rank."""

    start: float
    end: float
    rank: int
    action: Action


def run_rows(compute: Table, duration: Callable[[Action], float], send: float = 0.0) -> list[RanAction]:
    """Runs the rows of a table of compute actions, each action once its input has arrived.

    An input from another rank arrives ``send`` after it was computed. Sends wait for nothing and cost ranks no time.

    Args:
        compute: The compute actions of every rank.
        duration: Returns the duration of an action.
        send: Time of a send between ranks, in the same unit.

    Raises:
        ProgramError: The actions wait for each other, or a stage is in two rows.
    """
    placement = stage_to_rank(compute)
    num_stages = len(placement)
    position = [0] * len(compute)
    free = [0.0] * len(compute)
    made: dict[_Result, float] = {}
    waiting: dict[_Result, int] = {}
    actions: list[RanAction] = []
    runnable = list(range(len(compute)))
    while runnable:
        rank = runnable.pop()
        row = compute[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            start, needed = free[rank], input_of(action, num_stages)
            if needed is not None:
                if needed not in made:
                    waiting[needed] = rank
                    break
                start = max(start, made[needed] + (send if placement[needed[0]] != rank else 0.0))
            free[rank] = start + duration(action)
            actions.append(RanAction(start, free[rank], rank, action))
            position[rank] += 1
            if action.kind is not _W:
                result = (action.stage, _F if action.kind is _F else _B, action.microbatch)
                made[result] = free[rank]
                if result in waiting:
                    runnable.append(waiting.pop(result))
    stuck = [(rank, row[position[rank]]) for rank, row in enumerate(compute) if position[rank] < len(row)]
    if stuck:
        wrong = _missing_actions(compute) or _misordered_actions(compute) or [_deadlock(stuck, placement)]
        raise ProgramError("\n".join(wrong[:_SHOWN]))
    return actions


def _deadlock(stuck: Sequence[tuple[int, Action]], placement: Mapping[int, int]) -> str:
    """Returns a sentence about ranks at actions whose inputs never come."""
    waits = []
    for rank, action in stuck:
        needed = input_of(action, len(placement))
        source = f" waits for {Action(*needed)} on rank {placement[needed[0]]}" if needed else ""
        waits.append(f"rank {rank} at {action}{source}")
    return f"the actions wait for each other: {', '.join(waits)}"


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
    sharding = [iter(_sharding(row, unshard)) for row in compute]
    rows = [list(next(actions)) for actions in sharding]

    def order(ran: RanAction) -> tuple[float, int, int]:
        # of actions that start together, the one nearer to the source of the data first: its receiver can still post
        # the RECV before its own action
        stage, kind, _ = ran.action
        return ran.start, stage if kind is _F else num_stages - 1 - stage, ran.rank

    for _, _, rank, action in sorted(run_rows(compute, lambda action: _UNIT_TIME[action.kind]), key=order):
        rows[rank].append(action)
        send = Action(action.stage, ActionKind.SEND_F if action.kind is _F else ActionKind.SEND_B, action.microbatch)
        receive = send.other_end if action.kind is not _W else None
        if receive is not None and placement.get(receive.stage, rank) != rank:
            rows[rank].append(send)
            rows[placement[receive.stage]].append(receive)
        if action == last.get(action.stage):
            rows[rank].append(Action(action.stage, ActionKind.REDUCE_GRAD))
        rows[rank] += next(sharding[rank])
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


def _missing_actions(compute: Table) -> list[str]:
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


def _misordered_actions(compute: Table) -> list[str]:
    """Returns a sentence for every backward before its forward and every W before its I."""
    return [sentence for row in compute for sentence in _misordered(row)]


def _misordered(row: tuple[Action, ...]) -> Iterator[str]:
    seen: set[Action] = set()
    for action in row:
        needed = {_B: _F, _I: _F, _W: _I}.get(action.kind)
        if needed is not None and action._replace(kind=needed) not in seen:
            yield f"action {action} comes before {action._replace(kind=needed)}"
        seen.add(action)
