"""Schedules with stages placed in a V: against torch's order, published memory and bubbles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from simplan.program.schedules import PipelineShape, StageTimes, dualpipe_v, zb_v
from tests.program.tables.tables import bubble_rate, makespan_s, most_in_flight

GRID = list(product((1, 2, 3, 4), (1, 2, 5, 6, 7, 8, 16)))


def torch_row(schedule: str, rank: int, p: int, m: int) -> list[str]:
    """What torch's schedule of this name does on a rank, an overlapped pair as its two actions."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = getattr(pipelining, schedule)
    made: Any = kind.__new__(kind)
    made.pp_group_size, made.num_stages, made._num_stages, made._n_microbatches = p, 2 * p, 2 * p, m

    def flat(action: Any) -> Iterator[str]:
        if action is not None and action.sub_actions is not None:
            yield from map(str, action.sub_actions)
        elif action is not None:
            yield str(action)

    return [text for action in made._calculate_single_rank_operations(rank) for text in flat(action)]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_order_of_zb_v_is_torchs(p: int, m: int) -> None:
    for rank, row in enumerate(zb_v(PipelineShape(p, m, 2))):
        assert [str(action) for action in row] == torch_row("ScheduleZBVZeroBubble", rank, p, m)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= 2 * p])
def test_order_of_dualpipe_v_is_torchs_where_torch_has_one(p: int, m: int) -> None:
    for rank, row in enumerate(dualpipe_v(PipelineShape(p, m, 2))):
        assert [str(action) for action in row] == torch_row("ScheduleDualPipeV", rank, p, m)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m < 2 * p])
def test_fewer_microbatches_leave_gaps_in_dualpipe_v(p: int, m: int) -> None:
    """Where torch has no order, each rank does what it does for 2p microbatches, without those that are not there."""
    for few, enough in zip(dualpipe_v(PipelineShape(p, m, 2)), dualpipe_v(PipelineShape(p, 2 * p, 2)), strict=True):
        assert list(few) == [action for action in enough if action.microbatch is not None and action.microbatch < m]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_microbatches_in_flight(p: int, m: int) -> None:
    """Of half-size stages: 2p with ZB-V, as Qi et al. have it, one more with DualPipeV (DeepSeek's table, PP = 2p)."""
    shape = PipelineShape(p, m, 2)
    assert max(most_in_flight(zb_v(shape))) <= 2 * p
    assert max(most_in_flight(dualpipe_v(shape))) <= 2 * p + 1
    if m >= 2 * p - 1:
        assert most_in_flight(zb_v(shape)) == [2 * p] * p
    if m > 2 * p:
        assert most_in_flight(dualpipe_v(shape)) == [2 * p + 1] * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= 2 * p - 1])
def test_zb_v_has_no_bubble_when_all_take_as_long(p: int, m: int) -> None:
    """Ranks start one after the other and end so too: in all the p-1 units of the first microbatch's way down."""
    table = zb_v(PipelineShape(p, m, 2))
    assert bubble_rate(table, StageTimes.equal(2 * p)) == 0
    assert makespan_s(table, lambda _: 1) == 6 * m + p - 1


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= 2 * p])
def test_dualpipe_v_idles_p_minus_1_units_when_all_take_as_long(p: int, m: int) -> None:
    table = dualpipe_v(PipelineShape(p, m, 2))
    assert makespan_s(table, lambda action: 2 if action.kind == "B" else 1) == 6 * m + p - 1
