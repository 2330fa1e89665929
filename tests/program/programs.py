"""Programs of explicit operations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from simplan.program.program import ACTION_KINDS, SPAN_KINDS, STREAMS, MemoryCategory, Op, OpColumns, Program


def program_of(
    ops: Sequence[Op],
    num_ranks: int = 1,
    level: int = 2,
    persistent_bytes: Mapping[int, dict[MemoryCategory, int]] | None = None,
    rebuild_bytes: Mapping[int, int] | None = None,
) -> Program:
    """All of ranks 0 to ``num_ranks - 1``; the same object as work has one number, as in lowered Programs."""
    works = {id(op.work): op.work for op in ops}
    effects = tuple(dict.fromkeys([(), *(op.memory for op in ops)]))
    meetings: dict[Hashable, int] = {None: -1}
    for op in ops:
        meetings.setdefault(op.meeting, len(meetings) - 1)
    columns = OpColumns(
        np.array([op.rank for op in ops], np.int32),
        np.array([STREAMS.index(op.stream) for op in ops], np.int8),
        np.array([SPAN_KINDS.index(op.kind) for op in ops], np.int8),
        np.arange(len(ops), dtype=np.int32),
        np.array([op.action.stage for op in ops], np.int32),
        np.array([ACTION_KINDS.index(op.action.kind) for op in ops], np.int8),
        np.array([-1 if op.action.microbatch is None else op.action.microbatch for op in ops], np.int32),
        np.array([list(works).index(id(op.work)) for op in ops], np.int32),
        np.array([effects.index(op.memory) for op in ops], np.int32),
        np.array([meetings[op.meeting] for op in ops], np.int64),
        np.cumsum([0, *(len(op.waits) for op in ops)]),
        np.array([wait for op in ops for wait in op.waits], np.int32),
    )
    names = [op.name.replace("{", "{{") for op in ops]
    ranks = tuple(range(num_ranks))
    resting, rebuild = dict(persistent_bytes or {}), dict(rebuild_bytes or {})
    return Program(level, (), columns, names, tuple(works.values()), effects, ranks, ranks, resting, rebuild)
