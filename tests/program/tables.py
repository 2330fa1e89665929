"""Random valid tables, and an evaluator of tables that shares no code with the engine."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from simplan.program.action import Action, ActionKind, Table

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


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
    """What must have happened before a forward or backward."""
    stage, kind, microbatch = action
    if kind is F:
        return [Action(stage - 1, F, microbatch)] if stage else []
    return [Action(stage, F, microbatch)] + ([Action(stage + 1, B, microbatch)] if stage + 1 < num_stages else [])


def makespan_s(compute: Table, duration_s: Callable[[Action], float], send_s: float = 0.0) -> float:
    """End of the last action by the recursion end(a) = duration + max(end of its inputs + send, end before it)."""
    ends: dict[Action, float] = {}
    before = {row[i]: row[i - 1] if i else None for row in compute for i in range(len(row))}

    def end(action: Action) -> float:
        if action not in ends:
            previous = before[action]
            start = end(previous) if previous is not None else 0.0
            for need in needs(action, len(compute)):
                start = max(start, end(need) + (send_s if need.stage != action.stage else 0.0))
            ends[action] = start + duration_s(action)
        return ends[action]

    return max(end(action) for row in compute for action in row)
