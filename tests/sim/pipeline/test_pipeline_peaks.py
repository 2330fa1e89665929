"""Compiled peaks of memory against the walk over a Program's operations."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from simplan.program.action import Action, ActionKind
from simplan.program.program import Op
from simplan.sim.memory import memory_peak
from simplan.sim.pipeline.peaks import PipelineBytes, pipeline_in_flight, pipeline_peaks
from simplan.sim.pipeline.slots import Slot, kind_of
from simplan.spec.plan import Place, RankMapping
from tests.sim.pipeline.programs import SHARDING, Case, case, cases

_K = ActionKind
_SENDS = {_K.SEND_F: 0, _K.SEND_B: 1}


def changes(ops: list[Op]) -> tuple[int, int]:
    """The most that operations one after the other need beside what was held before, and what they leave."""
    most = left = 0
    for op in ops:
        most = max(most, left + sum(effect.during_bytes for effect in op.memory))
        left += sum(effect.after_bytes for effect in op.memory)
    return most, left


def bytes_of(case: Case, rank: int) -> PipelineBytes:
    """What the operations of one rank do to memory, by slot and stage; the same for all that have a slot."""
    found = PipelineBytes.zeros(case.table.num_stages, case.table.num_ranks, 1)
    known: dict[tuple[Slot, int], tuple[int, int]] = {}
    pp_rank = RankMapping.of(case.plan).place(rank).pp
    found.base[pp_rank] = sum(case.program.resting_bytes[rank].values())
    found.extra[pp_rank] = case.program.rebuild_bytes[rank]
    ops = [case.program.ops[index] for index in case.program.by_rank[rank]]
    groups: dict[Action, deque[list[Op]]] = defaultdict(deque)
    for action, group in groupby(ops, key=lambda op: op.action):
        groups[action].append(list(group))
        if action.kind in _SENDS:
            found.sent[_SENDS[action.kind], action.stage] = changes(groups[action][0])[1]
    for number, stage, microbatch in case.table.walk():
        slot, kind = Slot(number), kind_of(number)
        if case.table.rank_of[stage] != pp_rank or slot is Slot.OPTIM:
            continue
        coming = groups[Action(stage, kind, microbatch if kind.per_microbatch else None)]
        parts = coming.popleft() if coming else []
        settling = [op for op in parts if kind.is_compute and op.name.startswith("copy")]
        if settling:
            assert known.setdefault((Slot.SETTLE, stage), changes(settling)) == changes(settling)
        rest = changes([op for op in parts if op not in settling])
        assert known.setdefault((slot, stage), rest) == rest, (slot, stage, microbatch)
    for (slot, stage), (during, after) in known.items():
        found.during[slot, stage], found.after[slot, stage] = during, after
    return found


@settings(max_examples=50)
@given(cases())
def test_peaks_are_those_of_the_walk_over_operations(case: Case) -> None:
    mapping = RankMapping.of(case.plan)
    in_flight: dict[int, int] = {}
    for rank in case.program.ranks:
        expected = memory_peak(case.program, rank)
        in_flight |= expected.activations_in_flight
        pp_rank = mapping.place(rank).pp
        if mapping.place(rank)._replace(pp=0) == mapping.place(0):
            assert pipeline_peaks_of(case, rank)[pp_rank, 0] == expected.total_bytes
    assert dict(enumerate(pipeline_in_flight(case.table).tolist())) == in_flight


def pipeline_peaks_of(case: Case, rank: int) -> NDArray[np.int64]:
    """Peaks with the bytes of one rank; what other ranks hold is left out, and comes out as nothing."""
    return pipeline_peaks(case.table, bytes_of(case, rank))


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "sharding"),
    [
        ("gpipe", 4, 40, 1, "none"),
        ("1f1b", 4, 60, 1, "zero 3"),
        ("interleaved_1f1b", 3, 45, 5, "zero 3"),
        ("interleaved_1f1b", 2, 31, 2, "ddp"),
        ("zb-h1", 4, 40, 1, "zero 2"),
        ("zb-v", 3, 40, 2, "zero 2"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peaks_of_long_steps_are_too(schedule: str, p: int, m: int, v: int, sharding: str, precision: str) -> None:
    found = case(schedule, p, m, v, SHARDING[sharding], [1] * p * v, precision, tied=True)
    assert found.table.segments[:, 2].max() > 1, "something is written once that happens often"
    for rank in (RankMapping.of(found.plan).rank(Place(pp=pp)) for pp in range(p)):
        assert pipeline_peaks_of(found, rank)[:, 0].max() == memory_peak(found.program, rank).total_bytes
