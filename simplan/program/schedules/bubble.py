"""Times of the actions of a table for given stage times, and idle time of ranks, by a longest path."""

from __future__ import annotations

from simplan.program.action import Action, Table
from simplan.program.schedules.shape import StageTimes
from simplan.program.tables.complete import run_rows

__all__ = ["action_ends_s", "bubble_rate", "longest_span_s"]


def action_ends_s(compute: Table, times: StageTimes) -> dict[Action, float]:
    """Returns the end of every compute action; ranks run their rows in order, each action once its input has arrived.

    An input from another rank arrives ``send_s`` after it was computed. Sends wait for nothing and cost ranks no time.

    Raises:
        ProgramError: The actions wait for each other, or a stage is in two rows.
    """
    return {ran.action: ran.end for ran in run_rows(compute, times.duration_s, times.send_s)}


def longest_span_s(compute: Table, times: StageTimes) -> float:
    """Returns the longest time of a rank from the start of its first action to the end of its last.

    This is the cost of a step if each rank continues with its next step independently (Qi et al. 2024,
    arXiv:2401.10241, section 5.3, which defines this cost). The time from the first start to the last end would also
    include the wait for the first microbatch, and idle time at the end.
    """
    ends_s = action_ends_s(compute, times)
    return max(ends_s[row[-1]] - ends_s[row[0]] + times.duration_s(row[0]) for row in compute)


def bubble_rate(compute: Table, times: StageTimes) -> float:
    """Returns the fraction of the cost during which even the busiest rank is idle.

    (cost - m(F+I+W)) / cost for equal stages, as in Qi et al. 2024, table 5.
    """
    cost_s = longest_span_s(compute, times)
    return 1 - max(sum(times.duration_s(action) for action in row) for row in compute) / cost_s
