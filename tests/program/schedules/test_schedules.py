"""Schedules against their closed forms and against torch: order, completeness, bubbles, microbatches in flight."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.program.action import ActionKind, Table
from simplan.program.schedules import SCHEDULES, PipelineShape, StageTimes, gpipe, interleaved_1f1b, naive, one_f_one_b
from simplan.program.tables.check import check_table
from simplan.program.tables.complete import complete_table, stage_to_rank
from tests.program.tables.tables import makespan_s, most_in_flight, stage_times

RANKS, MICROBATCHES = (1, 2, 3, 5), (1, 2, 3, 4, 7, 10, 16)
GRID = list(product(RANKS, MICROBATCHES))
INTERLEAVED = [(p, m, v) for p, m, v in product((1, 2, 3, 4), MICROBATCHES, (1, 2, 3))]

pipelines = st.builds(PipelineShape, st.integers(1, 7), st.integers(1, 30), st.integers(1, 5))


def bubble(table: Table) -> Fraction:
    """Idle part of the ranks' time with equal stages, F = 1, B = 2 and free communications."""
    step_s = Fraction(makespan_s(table, lambda action: 1 if action.kind is ActionKind.FORWARD else 2))
    busy_s = sum(1 if action.kind is ActionKind.FORWARD else 2 for row in table for action in row)
    return 1 - busy_s / (len(table) * step_s)


@pytest.mark.parametrize("name", sorted(SCHEDULE_FACTS))
def test_every_schedule_passes_the_check(name: str) -> None:
    v = SCHEDULE_FACTS[name].virtual_stages or 1
    for p, m in GRID:
        check_table(complete_table(SCHEDULES[name](PipelineShape(p, m, v))), p * v, m)


@given(st.sampled_from(sorted(SCHEDULE_FACTS)), st.integers(1, 7), st.integers(1, 20), st.data())
def test_every_schedule_passes_the_check_with_any_times(name: str, p: int, m: int, data: st.DataObject) -> None:
    """Also sharded in windows, as torch gathers stages; and the last stage takes its forwards in order."""
    v = SCHEDULE_FACTS[name].virtual_stages or data.draw(st.integers(1, 4))
    table = SCHEDULES[name](PipelineShape(p, m, v, data.draw(stage_times(p * v))))
    check_table(complete_table(table, unshard=data.draw(st.sampled_from(["none", "once", "window"]))), p * v, m)
    forwards = [a for row in table for a in row if a.stage == p * v - 1 and a.kind is ActionKind.FORWARD]
    assert [a.microbatch for a in forwards] == list(range(m))


@pytest.mark.parametrize("name", sorted(SCHEDULE_FACTS))
def test_facts_of_a_schedule_are_those_of_its_table(name: str) -> None:
    facts = SCHEDULE_FACTS[name]
    v = facts.virtual_stages or 3
    table = SCHEDULES[name](PipelineShape(4, 8, v))
    ranks = {
        "loop": {stage: stage % 4 for stage in range(4 * v)},
        "v": {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 2, 6: 1, 7: 0},
    }
    assert stage_to_rank(table) == ranks[facts.placement]
    assert facts.splits_backward == any(a.kind is ActionKind.BACKWARD_INPUT for row in table for a in row)


@pytest.mark.parametrize("name", sorted(SCHEDULE_FACTS))
def test_only_what_needs_times_depends_on_them(name: str) -> None:
    """Weights that take hardly any time, and a slow last stage: no gap is where it is with equal times."""
    facts = SCHEDULE_FACTS[name]
    v = facts.virtual_stages or 2
    n = 4 * v
    uneven = StageTimes((1.0,) * (n - 1) + (5.0,), (3.0,) * n, (0.1,) * n, 1.0)
    changed = SCHEDULES[name](PipelineShape(4, 12, v, uneven)) != SCHEDULES[name](PipelineShape(4, 12, v))
    assert changed == facts.needs_times


@pytest.mark.parametrize(("p", "m"), GRID)
def test_microbatches_in_flight(p: int, m: int) -> None:
    shape = PipelineShape(p, m)
    assert most_in_flight(naive(shape)) == [1] * p
    assert most_in_flight(gpipe(shape)) == [m] * p
    assert most_in_flight(one_f_one_b(shape)) == [min(p - rank, m) for rank in range(p)]


@pytest.mark.parametrize(("p", "m", "v"), [(p, m, v) for p, m, v in INTERLEAVED if m % p == 0])
def test_interleaved_by_its_closed_forms(p: int, m: int, v: int) -> None:
    """Narayanan et al. 2021, section 2.2.2, and the warm-up of Megatron-LM's schedules.py."""
    table = interleaved_1f1b(PipelineShape(p, m, v))
    assert bubble(table) == Fraction(p - 1, v * m + p - 1)
    assert most_in_flight(table) == [min((p - rank - 1) * 2 + (v - 1) * p + 1, v * m) for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_bubbles_of_one_stage_a_rank(p: int, m: int) -> None:
    shape = PipelineShape(p, m)
    assert bubble(naive(shape)) == Fraction(p - 1, p)
    assert bubble(gpipe(shape)) == bubble(one_f_one_b(shape)) == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if p > 1 and m >= p])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_order_is_torchs(name: str, p: int, m: int) -> None:
    """Against the order torch displays; that of 1F1B's last rank is off by one in torch, so it is left out."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[name]
    schedule = kind.__new__(kind)
    schedule._num_stages, schedule._n_microbatches = p, m
    order = schedule._get_pipeline_order()
    for rank in range(p if name == "gpipe" else p - 1):
        assert [str(a) for a in order[rank] if a is not None and a.microbatch_index is not None] == [
            str(a) for a in SCHEDULES[name](PipelineShape(p, m))[rank]
        ]


@pytest.mark.parametrize(("p", "m", "v"), [(p, m, v) for p, m, v in INTERLEAVED if m % max(1, m // p) == 0])
def test_interleaved_order_is_torchs_where_torch_has_one(p: int, m: int, v: int) -> None:
    """Torch takes m that are a multiple of its number of rounds, which need not be multiples of p."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule: Any = pipelining.ScheduleInterleaved1F1B.__new__(pipelining.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, v, m
    schedule.microbatches_per_round = m // max(1, m // p)
    ours = interleaved_1f1b(PipelineShape(p, m, v))
    for rank in range(p):
        theirs = schedule._calculate_single_rank_operations(rank)
        assert [str(a) for a in theirs if a is not None] == [str(a) for a in ours[rank]]


@given(pipelines)
def test_interleaved_rounds_keep_the_pipeline_full(shape: PipelineShape) -> None:
    """A rank never waits longer than a 1F1B of whole microbatches would make it wait."""
    plain = PipelineShape(shape.num_ranks, shape.num_microbatches)
    assert bubble(interleaved_1f1b(shape)) <= bubble(one_f_one_b(plain))


def test_rounds_that_do_not_come_out_even_are_longer_first() -> None:
    """Seven microbatches on two ranks: rounds of three, two and two."""
    last = " ".join(str(action) for action in interleaved_1f1b(PipelineShape(2, 7, 2))[1] if action.kind == "F")
    assert last == "1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4 1F5 1F6 3F5 3F6"
