"""Random valid tables and stage times, and an evaluator of tables that shares no code with the engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from hypothesis import strategies as st

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules import StageTimes
from simplan.program.schedules.shape import longest_span_s

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


@st.composite
def compute_tables(draw: st.DrawFn) -> Table:
    """A valid one-stage-a-rank table in random order, made by running it: any ready action may come next."""
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    total = 2 * num_ranks * num_microbatches
    while len(done) < total:
        ready = [
            action
            for rank in range(num_ranks)
            for microbatch in range(num_microbatches)
            for action in (Action(rank, F, microbatch), Action(rank, B, microbatch))
            if action not in done and all(need in done for need in needs(action, num_ranks))
        ]
        chosen = draw(st.sampled_from(ready))
        rows[chosen.stage].append(chosen)
        done.add(chosen)
    return tuple(tuple(row) for row in rows)


def needs(action: Action, num_stages: int) -> list[Action]:
    """What must have happened before a compute action; B stands for the input gradient that a B or an I makes."""
    stage, kind, microbatch = action
    if kind is WEIGHT:
        return [Action(stage, B, microbatch)]
    if kind is F:
        return [Action(stage - 1, F, microbatch)] if stage else []
    return [Action(stage, F, microbatch)] + ([Action(stage + 1, B, microbatch)] if stage + 1 < num_stages else [])


def makespan_s(compute: Table, duration_s: Callable[[Action], float], send_s: float = 0.0) -> float:
    """End of the last action by the recursion end(a) = duration + max(end of its inputs + send, end before it)."""
    rank_of = {action.stage: rank for rank, row in enumerate(compute) for action in row}
    ends: dict[Action, float] = {}
    rows = [list(reversed(row)) for row in compute]
    while any(rows):
        before = len(ends)
        for rank, row in enumerate(rows):
            free_s = max((ends[action] for action in compute[rank][: len(compute[rank]) - len(row)][-1:]), default=0.0)
            while row and all(need in ends for need in needs(row[-1], len(rank_of))):
                action = row.pop()
                inputs = needs(action, len(rank_of))
                arrivals = [ends[need] + (send_s if rank_of[need.stage] != rank else 0.0) for need in inputs]
                ends[action] = free_s = max([free_s, *arrivals]) + duration_s(action)
                if action.kind is INPUT:
                    ends[Action(action.stage, B, action.microbatch)] = free_s
        assert len(ends) > before, "the actions wait for each other"
    return max(ends.values())


def bubble_rate(compute: Table, times: StageTimes) -> float:
    """Fraction of the cost of a step during which even the busiest rank is idle.

    (cost - m(F+I+W)) / cost for equal stages, as in Qi et al. 2024, table 5.
    """
    cost_s = longest_span_s(compute, times)
    return 1 - max(sum(times.duration_s(action) for action in row) for row in compute) / cost_s


def most_in_flight(table: Table, until: ActionKind = WEIGHT) -> list[int]:
    """By rank, most stage inputs between their forward and the end of their backward: the whole of it, or ``until``."""
    peaks = []
    for row in table:
        alive = peak = 0
        for action in row:
            alive += {F: 1, B: -1, until: -1}.get(action.kind, 0)
            peak = max(peak, alive)
        peaks.append(peak)
    return peaks


def most_memory(table: Table, kept_for_weight: float) -> float:
    """Most microbatches' activations on a rank that keeps all from F to I, and a part until W."""
    change = {F: 1.0, INPUT: kept_for_weight - 1, WEIGHT: -kept_for_weight}
    return max(max(accumulate(change[action.kind] for action in row)) for row in table)


@st.composite
def stage_times(draw: st.DrawFn, num_stages: int) -> StageTimes:
    """Times of every stage by itself, some much longer than others, in whole units so that sums are exact."""
    lists = st.lists(st.integers(1, 12), min_size=num_stages, max_size=num_stages)
    forward_s, input_s, weight_s = (tuple(float(time) for time in draw(lists)) for _ in range(3))
    return StageTimes(forward_s, input_s, weight_s, float(draw(st.integers(0, 5))))
