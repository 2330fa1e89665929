"""When the actions of a table happen with given stage times, and how long ranks are idle: a longest path."""

from __future__ import annotations

from simplan.errors import ProgramError
from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import StageTimes
from simplan.program.tables.complete import input_of, stage_to_rank

__all__ = ["action_ends_s", "bubble_rate", "longest_span_s"]


def action_ends_s(compute: Table, times: StageTimes) -> dict[Action, float]:
    """End of every compute action: a rank does its row in order, each action as soon as its input has come.

    An input from another rank comes ``send_s`` after it was made; messages wait for nothing and cost ranks no time.

    Raises:
        ProgramError: The actions wait for each other, or a stage is in two rows.
    """
    placement = stage_to_rank(compute)
    num_stages = len(placement)
    ends_s: dict[Action, float] = {}
    made_s: dict[tuple[int, ActionKind, int | None], float] = {}
    position = [0] * len(compute)
    free_s = [0.0] * len(compute)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(compute):
            while position[rank] < len(row):
                action = row[position[rank]]
                needed = input_of(action, num_stages)
                if needed is not None:
                    if needed not in made_s:
                        break
                    delay_s = times.send_s if placement[needed[0]] != rank else 0.0
                    free_s[rank] = max(free_s[rank], made_s[needed] + delay_s)
                free_s[rank] += times.duration_s(action)
                ends_s[action] = free_s[rank]
                if action.kind is not ActionKind.BACKWARD_WEIGHT:
                    result = ActionKind.FORWARD if action.kind is ActionKind.FORWARD else ActionKind.BACKWARD
                    made_s[action.stage, result, action.microbatch] = free_s[rank]
                position[rank] += 1
                moved = True
    stuck = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(compute) if position[r] < len(row)]
    if stuck:
        raise ProgramError(f"the actions wait for each other or for actions that never come: {', '.join(stuck)}")
    return ends_s


def longest_span_s(compute: Table, times: StageTimes) -> float:
    """The longest time of a rank from the start of its first action to the end of its last.

    This is what a step costs where each rank goes on to its next step by itself (Qi et al. 2024, arXiv:2401.10241,
    section 5.3, whose cost it is), not the time from the first start to the last end, in which ranks wait for the first
    microbatch at the beginning and for no one at the end.
    """
    ends_s = action_ends_s(compute, times)
    return max(ends_s[row[-1]] - ends_s[row[0]] + times.duration_s(row[0]) for row in compute)


def bubble_rate(compute: Table, times: StageTimes) -> float:
    """The part of the cost that not even the busiest rank computes in.

    (cost - m(F+I+W)) / cost for equal stages, as in Qi et al. 2024, table 5.
    """
    cost_s = longest_span_s(compute, times)
    return 1 - max(sum(times.duration_s(action) for action in row) for row in compute) / cost_s
