"""The compiled engine and the memory arrays beside the SimPy engine and the memory walk, on Programs of any shape.

Lowered Programs are compared in ``tests/test_random_plans.py`` and ``tests/predict/test_folding_scenarios.py``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.errors import NotModelledError
from simplan.predict.simulated import engine_of
from simplan.program.action import Action, ActionKind
from simplan.program.program import MemoryCategory, MemoryEffect, Op, Program, Stream
from simplan.program.schedules import PipelineShape, gpipe, one_f_one_b
from simplan.program.timeline import SpanKind
from simplan.sim.compiled import compile_program
from simplan.sim.engine import CoreUse, simulate
from tests.laws import check_engines
from tests.program.programs import program_of
from tests.sim.test_engine import durations, program
from tests.support.problems import refuses

STREAMS = (Stream.COMPUTE, Stream.DATA, Stream.SEND_F, Stream.RECV_F)
ACTION = Action(0, ActionKind.FORWARD, 0)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any operations that can run in the order in which they are drawn: then no cycle is possible."""
    num_ranks = draw(st.integers(1, 4))
    drawn: list[tuple[int, Stream, list[int], Hashable | None]] = []  # waits are positions in this list
    of_rank: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    for number in range(draw(st.integers(0, 24))):
        members = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=3, unique=True))
        met = [
            (rank, draw(st.sampled_from(STREAMS)), draw(st.lists(st.sampled_from(of_rank[rank]), max_size=3)))
            if of_rank[rank]
            else (rank, draw(st.sampled_from(STREAMS)), [])
            for rank in members
        ]
        for rank, stream, waits in met:
            of_rank[rank].append(len(drawn))
            drawn.append((rank, stream, waits, ("meeting", number) if len(members) > 1 else None))
    order = range(len(drawn)) if draw(st.booleans()) else sorted(range(len(drawn)), key=lambda i: drawn[i][0])
    place = {position: index for index, position in enumerate(order)}
    ops = []
    for position in order:
        rank, stream, waits, meeting = drawn[position]
        ops.append(
            Op(
                rank,
                stream,
                str(position),
                ACTION,
                SpanKind.COMPUTE,
                (),
                tuple(place[wait] for wait in waits),
                meeting,
                (),
            )
        )
    ranks = tuple(range(num_ranks))
    resting = {rank: {MemoryCategory.PARAMETERS: draw(st.integers(0, 5))} for rank in ranks}
    rebuild = {rank: draw(st.integers(0, 9)) for rank in ranks}
    return program_of(draw(_with_memory(ops)), num_ranks, 1, resting, rebuild)


@st.composite
def _with_memory(draw: st.DrawFn, ops: list[Op]) -> list[Op]:
    """Each operation takes something for as long as it runs, or until the last of its rank."""
    held: dict[int, int] = {}
    last = {op.rank: index for index, op in enumerate(ops)}
    done = []
    for index, op in enumerate(ops):
        effects = []
        for category in draw(st.lists(st.sampled_from([MemoryCategory.ACTIVATIONS, MemoryCategory.LOGITS]))):
            during, stays = draw(st.integers(0, 6)), category is MemoryCategory.ACTIVATIONS and draw(st.booleans())
            effects.append(MemoryEffect(category, during, during if stays else 0))
            held[op.rank] = held.get(op.rank, 0) + (during if stays else 0)
        if last[op.rank] == index:
            effects.append(MemoryEffect(MemoryCategory.ACTIVATIONS, 0, -held.get(op.rank, 0)))
        done.append(replace(op, memory=tuple(effects)))
    return done


@given(programs(), st.data())
def test_any_static_program_runs_alike_in_both_engines(static: Program, data: st.DataObject) -> None:
    seconds = st.one_of(st.integers(0, 3).map(float), st.floats(0.0, 10.0))
    drawn = [data.draw(seconds) for _ in static.ops]
    leader = {op.meeting: index for index, op in reversed(list(enumerate(static.ops))) if op.meeting is not None}
    given_s = [drawn[index if op.meeting is None else leader[op.meeting]] for index, op in enumerate(static.ops)]
    check_engines(static, given_s)


def test_many_vectors_are_as_many_runs() -> None:
    """More than are evaluated at once, and not a multiple of that."""
    static = program(gpipe(PipelineShape(4, 5)), dp=2, level=2, layers_per_stage=2)
    vectors_s = np.array([durations(static, 1.0 + k, 2.0, 0.1 * k) for k in range(19)])
    compiled = compile_program(static)
    alone = [simulate(static, list(vector_s)) for vector_s in vectors_s]
    assert compiled.step_times_s(vectors_s) == [times.step_time_s for times in alone]
    starts_s, ends_s = compiled.spans(vectors_s)
    assert starts_s.tolist() == [times.start_s.tolist() for times in alone]
    assert ends_s.tolist() == [times.end_s.tolist() for times in alone]


def test_ranks_that_share_cores_are_refused_by_name() -> None:
    static = program(one_f_one_b(PipelineShape(2, 2)))
    cores = CoreUse(2, [0] * len(static.ops), [1.0] * len(static.ops))
    with refuses("cluster", rule="static Programs only", fix="simulate it with the SimPy", kind=NotModelledError):
        compile_program(static, cores)
    given_s = durations(static, 1.0, 2.0)
    ours, theirs = engine_of(static, cores).times(given_s), simulate(static, given_s, cores)
    assert ours.end_s.tolist() == theirs.end_s.tolist()


def test_a_deadlock_is_found() -> None:
    """Two ranks that each wait for the meeting that the other comes to later."""
    ops = [
        Op(rank, Stream.DATA, "met", ACTION, SpanKind.COMMUNICATION, (), (), meeting)
        for rank, meetings in ((0, "ab"), (1, "ba"))
        for meeting in meetings
    ]
    program = program_of(ops, 2, 1)
    with pytest.raises(AssertionError, match="deadlock"):
        compile_program(program)
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(program, [1.0] * 4)
