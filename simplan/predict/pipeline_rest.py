"""What further microbatches add to the step of a pipeline, from a simulated step with few of them.

A step with few microbatches tells how long actions take and what they do to memory. The rest is a matter of the
schedule: how much later a step with many of them ends is the longest path through its table in machine code
(``simplan.sim.pipeline``), with many less with few; how much more memory a rank needs is found by walking its row of
the table, again with many and with few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.action import Action, ActionKind, Table
from simplan.program.program import MemoryCategory, Program, Stream
from simplan.sim.pipeline.orders import COMPILED_SCHEDULES
from simplan.sim.pipeline.table import compiled_table
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times
from simplan.spec.plan import ParallelPlan, RankMapping
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["added_bytes", "added_s", "can_add", "round_s"]

_Floats = NDArray[np.float64]
_FEWEST = 3  # a first microbatch, a last one, and one between
_MESSAGES = frozenset({Stream.SEND_F, Stream.RECV_F, Stream.SEND_B, Stream.RECV_B})
_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


def can_add(plan: ParallelPlan, few: int) -> bool:
    """Whether all is known: whole backwards, a table in machine code, and stages that nothing has to gather."""
    facts = SCHEDULE_FACTS.get(plan.schedule)
    known = plan.schedule in COMPILED_SCHEDULES and facts is not None and not facts.splits_backward
    return known and plan.pp > 1 and not plan.shards_parameters and few >= _FEWEST


def added_s(
    program: Program,
    durations_s: _Floats,
    spans_s: tuple[_Floats, _Floats],
    plan: ParallelPlan,
    few: int,
    many: int,
    *,
    blocking_sends: bool,
    received_ahead: bool,
) -> _Floats:
    """Seconds, one for each vector of durations.

    Args:
        program: The step with few microbatches.
        durations_s: ``(vectors, operations)``.
        spans_s: Starts and ends of the same.
        plan: The plan.
        few, many: Microbatches.
        blocking_sends, received_ahead: As of ``pipeline_times``.
    """
    times = _times(program, durations_s, spans_s, plan)
    tables = [compiled_table(plan.schedule, plan.pp, m, plan.virtual_stages, "none") for m in (many, few)]
    how = {"blocking_sends": blocking_sends, "received_ahead": received_ahead}
    ends = [pipeline_times(table, times, **how) for table in tables]
    return np.asarray(ends[0] - ends[1])


def round_s(program: Program, start_s: _Floats, plan: ParallelPlan) -> _Floats:
    """Between the second and the third round of microbatches through an interleaved pipeline, by vector of durations.

    Args:
        program: A step of three rounds.
        start_s: ``(vectors, operations)``.
        plan: The plan.
    """
    second, third = (
        start_s[:, [i for i, op in enumerate(program.ops) if op.action == action]].min(axis=1)
        for action in (Action(plan.num_stages - 1, ActionKind.FORWARD, each * plan.pp) for each in (1, 2))
    )
    return np.asarray(third - second)


def _times(
    program: Program, durations_s: _Floats, spans_s: tuple[_Floats, _Floats], plan: ParallelPlan
) -> PipelineTimes:
    """How long actions and messages take: an action as long as it took where it waited for nothing."""
    times = PipelineTimes.zeros(plan.num_stages, plan.pp, len(durations_s))
    start_s, end_s = spans_s
    mapping = RankMapping.of(plan)
    last = max(action.microbatch or 0 for row in program.table for action in row)
    usual: dict[tuple[int, ActionKind], list[_Floats]] = {}
    for (kind, stage, microbatch), indices in _by_action(program).items():
        if kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.REDUCE_GRAD):
            taken_s = end_s[:, indices].max(axis=1) - start_s[:, indices].min(axis=1)
            usual.setdefault((stage, kind), []).append(taken_s)
            if kind is ActionKind.BACKWARD and microbatch == last:
                times.backward_last_s[stage] = taken_s
        elif kind in _SENDS and not microbatch:
            ranks = len({program.ops[index].rank for index in indices})
            times.send_s[int(kind is ActionKind.SEND_B), stage] = durations_s[:, indices].sum(axis=1) / ranks
        elif kind is ActionKind.OPTIM:
            for index in indices:
                op = program.ops[index]
                if op.stream is Stream.TIED:
                    times.tied_s[:] = durations_s[:, index]
                elif op.stream is Stream.COMPUTE:
                    times.update_s[mapping.place(op.rank).pp] += durations_s[:, index]
                else:
                    times.after_s[mapping.place(op.rank).pp] += durations_s[:, index]
    rows = {
        ActionKind.FORWARD: times.forward_s,
        ActionKind.BACKWARD: times.backward_s,
        ActionKind.REDUCE_GRAD: times.reduce_s,
    }
    for (stage, kind), found in usual.items():
        rows[kind][stage] = np.min(found, axis=0)
    return times


def _by_action(program: Program) -> dict[tuple[ActionKind, int, int | None], list[int]]:
    """Operations of every action but messages that it waits for."""
    found: dict[tuple[ActionKind, int, int | None], list[int]] = {}
    for index, op in enumerate(program.ops):
        action = op.action
        if op.stream not in _MESSAGES or action.kind in _SENDS:
            found.setdefault((action.kind, action.stage, action.microbatch), []).append(index)
    return found


class _Change(NamedTuple):
    """What an action does to a rank's memory: at its worst moment, and in the end."""

    during: int
    after: int


class _Changes(NamedTuple):
    """What actions of one kind and stage do: the first of them, the last, and those between."""

    first: _Change
    between: _Change
    last: _Change


_Of = dict[tuple[ActionKind, int], _Changes]


def added_bytes(program: Program, many: Table) -> list[int]:
    """By rank of ``program.ranks``, what it needs more at its worst instant with the table of many microbatches.

    What ranks hold between steps is left out.

    Args:
        program: The step with few microbatches.
        many: The table; of fewer microbatches where more of them need no more memory.
    """
    width = len(program.stands_for) // len(many)
    found = []
    for rank in program.ranks:
        less_row, more_row = program.table[rank // width], many[rank // width]
        changes = _changes(program, rank, less_row)
        more, less = (_peak(row, changes, program.rebuild_bytes[rank]) for row in (more_row, less_row))
        found.append(more - less)
    return found


def _changes(program: Program, rank: int, row: Sequence[Action]) -> _Of:
    """What the actions of a rank do; those that do nothing are left out."""
    of_action: dict[Action, _Change] = {}
    elsewhere = None if program.one_memory else MemoryCategory.HOST
    for index in program.by_rank[rank]:
        op = program.ops[index]
        during, held = of_action.get(op.action, _Change(0, 0))
        effects = [effect for effect in op.memory if effect.category is not elsewhere]
        if effects:
            during = max(during, held + sum(effect.during_bytes for effect in effects))
            of_action[op.action] = _Change(during, held + sum(effect.after_bytes for effect in effects))
    alike: dict[tuple[ActionKind, int], list[_Change]] = {}
    for action in row:
        alike.setdefault((action.kind, action.stage), []).append(of_action.get(action, _Change(0, 0)))
    changes = {key: _Changes(found[0], found[len(found) // 2], found[-1]) for key, found in alike.items()}
    return {key: change for key, change in changes.items() if any(map(any, change))}


def _peak(row: Sequence[Action], changes: _Of, most: int) -> int:
    """The largest sum of changes so far, at least ``most``."""
    keys = [key for action in row if (key := (action.kind, action.stage)) in changes]
    left = Counter(keys)
    begun: set[tuple[ActionKind, int]] = set()
    held = 0
    for key in keys:
        left[key] -= 1
        place = 2 if not left[key] and key in begun else 1 if key in begun else 0
        begun.add(key)
        during, after = changes[key][place]
        if held + during > most:
            most = held + during
        held += after
    return most
