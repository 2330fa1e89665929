"""Zero-bubble schedules with one stage a rank: closed forms of idle time and memory, limits kept, nothing better."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules import PipelineShape, StageTimes, one_f_one_b, zb_1p, zb_2p, zb_h1, zb_h2
from simplan.program.schedules.shape import longest_span_s
from simplan.program.schedules.zero_bubble_search import Tactics, build
from tests.program.tables.tables import most_in_flight, most_memory, stage_times

INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
GRID = list(product((1, 2, 3, 5), (1, 2, 4, 5, 9, 10, 16)))
units = st.integers(1, 9)


@pytest.mark.parametrize(("p", "m"), GRID)
def test_microbatches_in_flight(p: int, m: int) -> None:
    """Qi et al. 2024, section 2: ZB-H1 has 1F1B's memory, ZB-H2 2p-1 microbatches at most, on every rank."""
    shape = PipelineShape(p, m)
    assert most_in_flight(zb_h1(shape), until=INPUT) == most_in_flight(one_f_one_b(shape))
    assert most_in_flight(zb_h1(shape), until=WEIGHT) == [min(p, m)] * p
    assert most_in_flight(zb_h2(shape), until=INPUT) == [min(2 * (p - rank) - 1, m) for rank in range(p)]
    assert most_in_flight(zb_h2(shape), until=WEIGHT) == [min(2 * p - 1, m)] * p


@pytest.mark.parametrize(("p", "m"), GRID)
def test_zb_h1_without_its_weights_is_1f1b(p: int, m: int) -> None:
    def whole(table: Table) -> list[list[Action]]:
        return [
            [a._replace(kind=ActionKind.BACKWARD) if a.kind is INPUT else a for a in r if a.kind is not WEIGHT]
            for r in table
        ]

    assert whole(zb_h1(PipelineShape(p, m))) == whole(one_f_one_b(PipelineShape(p, m)))


@given(st.integers(1, 6), st.integers(0, 20), units, units, units)
def test_idle_time_of_the_handcrafted_schedules(p: int, more: int, f: int, i: int, w: int) -> None:
    """Qi et al. 2024, section 2.3, table 2, for W no longer than the others, with enough microbatches."""
    w = min(f, i, w)
    times = StageTimes.equal(p, f, i, w)
    for schedule, m, idle in (
        (zb_h1, p + more, (p - 1) * (f + i - w)),
        (zb_h2, 2 * p - 1 + more, (p - 1) * (f + i - 2 * w)),
    ):
        assert longest_span_s(schedule(PipelineShape(p, m)), times) == m * (f + i + w) + idle


@given(st.integers(1, 6), st.integers(1, 20), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.data())
def test_automatic_schedules_keep_their_memory_limit(p: int, m: int, kept: float, data: st.DataObject) -> None:
    shape = PipelineShape(p, m, times=data.draw(stage_times(p)), kept_for_weight=kept)
    assert most_memory(zb_1p(shape), kept) <= p
    assert most_memory(zb_2p(shape), kept) <= 2 * p


@given(st.integers(1, 6), st.integers(1, 20), st.data())
def test_automatic_schedules_are_no_longer_than_handcrafted_ones(p: int, m: int, data: st.DataObject) -> None:
    times = data.draw(stage_times(p))
    shape = PipelineShape(p, m, times=times)
    assert longest_span_s(zb_1p(shape), times) <= longest_span_s(zb_h1(shape), times) * (1 + 1e-9)
    assert longest_span_s(zb_2p(shape), times) <= longest_span_s(zb_h2(shape), times) * (1 + 1e-9)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= 2 * p - 1])
def test_automatic_schedules_of_equal_times_are_optimal(p: int, m: int) -> None:
    """Within p microbatches no schedule idles less than (p-1)(F+I-W) (section 2.1), within 2p none has to idle."""
    shape = PipelineShape(p, m)
    assert longest_span_s(zb_1p(shape), shape.stage_times) == 3 * m + p - 1
    assert longest_span_s(zb_2p(shape), shape.stage_times) == 3 * m


def test_zb_2p_is_as_short_as_any_schedule_can_be_where_weights_are_short() -> None:
    """First microbatch down, all forwards and input gradients of the last rank, the last gradient up and its weight.

    With few microbatches and short W no memory helps against this path; times are those of a GPT of 1.5 billion
    parameters on 8 ranks (arXiv:2401.10241, table 6, first row).
    """
    p, m, f, i, w, send = 8, 24, 18.522, 18.086, 9.337, 0.601
    times = StageTimes.equal(p, f, i, w, send)
    bound_s = (p - 1) * (f + i + 2 * send) + m * (f + i) + w
    assert longest_span_s(zb_2p(PipelineShape(p, m, times=times)), times) == pytest.approx(bound_s, rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 20), st.tuples(st.booleans(), st.booleans(), st.booleans()), st.data())
def test_the_clock_of_the_search_is_the_longest_path(
    p: int, m: int, tactics: tuple[bool, bool, bool], data: st.DataObject
) -> None:
    times = data.draw(stage_times(p))
    limit = data.draw(st.integers(1, 3 * p))
    built = build(PipelineShape(p, m, times=times), limit, Tactics(*tactics))
    assert built.longest_span_s == pytest.approx(longest_span_s(built.table(), times), rel=1e-12)


def test_times_of_other_units_give_the_same_schedule() -> None:
    """Ties are broken by no rounding: the times in seconds order what the times in milliseconds do."""
    milliseconds = StageTimes.equal(8, 10.402, 10.248, 7.698, 0.46)
    seconds = StageTimes.equal(8, 0.010402, 0.010248, 0.007698, 0.00046)
    for schedule in (zb_1p, zb_2p):
        assert schedule(PipelineShape(8, 64, times=milliseconds)) == schedule(PipelineShape(8, 64, times=seconds))
