"""What further microbatches add to the step of a pipeline, from a simulated step with few of them.

A step is simulated once with few microbatches, whose actions tell how long actions take. How much later a step with
more of them ends is then a matter of the schedule alone: the longest path through its table in machine code
(``simplan.sim.pipeline``), with many microbatches less with few. What stands at the ends of a step (reductions, tied
weights, the optimizer) is in both, and so in the simulated step only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from simplan.program.action import ActionKind
from simplan.program.program import Program, Stream
from simplan.sim.pipeline.orders import COMPILED_SCHEDULES
from simplan.sim.pipeline.table import compiled_table
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times
from simplan.spec.plan import ParallelPlan

__all__ = ["added_s", "can_add"]

_Floats = NDArray[np.float64]
_MESSAGES = frozenset({Stream.SEND_F, Stream.RECV_F, Stream.SEND_B, Stream.RECV_B})
_ROWS: Mapping[ActionKind, tuple[int, int]] = {
    ActionKind.FORWARD: (0, 0),
    ActionKind.BACKWARD: (1, 2),
    ActionKind.BACKWARD_INPUT: (3, 3),
    ActionKind.BACKWARD_WEIGHT: (4, 5),
}
"""By kind, its row of durations, and that of the last one of its stage (``simplan.sim.pipeline.walk``)."""


def can_add(plan: ParallelPlan) -> bool:
    """Whether the schedule has a table in machine code, and stages are computed as they are, without being gathered."""
    return plan.pp > 1 and plan.schedule in COMPILED_SCHEDULES and not plan.shards_parameters


def added_s(
    program: Program,
    durations_s: _Floats,
    spans_s: tuple[_Floats, _Floats],
    plan: ParallelPlan,
    few: int,
    many: int,
    *,
    blocking_sends: bool,
) -> _Floats:
    """Seconds, one for each vector of durations.

    Args:
        program: The step with few microbatches.
        durations_s: ``(vectors, operations)``.
        spans_s: Starts and ends of the same.
        plan: The plan.
        few, many: Microbatches.
        blocking_sends: A rank waits for its sends before it goes on.
    """
    times = _times(program, durations_s, spans_s, plan)
    tables = [compiled_table(plan.schedule, plan.pp, m, plan.virtual_stages, "none") for m in (many, few)]
    ends = [pipeline_times(table, times, blocking_sends=blocking_sends) for table in tables]
    return np.asarray(ends[0] - ends[1])


def _times(
    program: Program, durations_s: _Floats, spans_s: tuple[_Floats, _Floats], plan: ParallelPlan
) -> PipelineTimes:
    """How long actions and messages take: an action as long as it took where it waited for nothing."""
    times = PipelineTimes.zeros(plan.num_stages, plan.pp, len(durations_s))
    actions: dict[tuple[int, ActionKind, int | None], list[int]] = {}
    sends: dict[tuple[int, int], dict[int, list[int]]] = {}
    for index, op in enumerate(program.ops):
        kind, stage = op.action.kind, op.action.stage
        if kind in _ROWS and op.stream not in _MESSAGES:
            actions.setdefault((stage, kind, op.action.microbatch), []).append(index)
        elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            of_boundary = sends.setdefault((int(kind is ActionKind.SEND_B), stage), {})
            of_boundary.setdefault(op.action.microbatch or 0, []).append(index)
    taken: dict[tuple[int, ActionKind], list[_Floats]] = {}
    start_s, end_s = spans_s
    for (stage, kind, _), indices in actions.items():
        taken.setdefault((stage, kind), []).append(end_s[:, indices].max(axis=1) - start_s[:, indices].min(axis=1))
    for (stage, kind), found in taken.items():
        usual_s = np.min(found, axis=0)
        for row in set(_ROWS[kind]):
            times.compute_s[row, stage] = usual_s
    for (way, stage), by_microbatch in sends.items():
        indices = min(by_microbatch.values(), key=len)
        times.send_s[way, stage] = durations_s[:, indices].sum(axis=1) / _ranks(program, indices)
    return times


def _ranks(program: Program, indices: list[int]) -> int:
    """Ranks that issue some operations."""
    return len({program.ops[index].rank for index in indices})
