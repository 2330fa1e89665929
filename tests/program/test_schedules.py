"""Schedules against their closed forms: order, completeness, microbatches in flight."""

from __future__ import annotations

import pytest

from simplan.program.action import Action, ActionKind, Table
from simplan.program.check import check_table
from simplan.program.complete import complete_table
from simplan.program.schedules import SCHEDULES, gpipe, naive, one_f_one_b

GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 16, 33)]


def most_in_flight(table: Table) -> list[int]:
    """By rank, most microbatches between their forward and the end of their backward."""
    most = []
    for row in table:
        alive = peak = 0
        for action in row:
            alive += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0)
            peak = max(peak, alive)
        most.append(peak)
    return most


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), GRID)
def test_every_schedule_passes_the_check(name: str, p: int, m: int) -> None:
    check_table(complete_table(SCHEDULES[name](p, m)), p, m)


@pytest.mark.parametrize(("p", "m"), GRID)
def test_microbatches_in_flight(p: int, m: int) -> None:
    assert most_in_flight(naive(p, m)) == [1] * p
    assert most_in_flight(gpipe(p, m)) == [m] * p
    assert most_in_flight(one_f_one_b(p, m)) == [min(p - rank, m) for rank in range(p)]


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
            str(a) for a in SCHEDULES[name](p, m)[rank]
        ]


def test_1f1b_of_four_ranks_as_published() -> None:
    """Narayanan et al. 2021, figure 4 (top): the last rank alternates, the first warms up with three forwards."""
    first, *_, last = (" ".join(map(str, row)) for row in one_f_one_b(4, 8))
    assert first == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"
    assert last == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"


def test_completed_1f1b_of_two_ranks() -> None:
    """A receive is posted when the sender starts to make its data, REDUCE_GRAD and OPTIM end the row."""
    first, last = (" ".join(map(str, row)) for row in complete_table(one_f_one_b(2, 2)))
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0OPTIM"
    assert last == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1OPTIM"


def test_stages_of_one_rank_hand_over_without_messages() -> None:
    """A V: stages 0 and 3 on rank 0, 1 and 2 on rank 1."""
    f, b = ActionKind.FORWARD, ActionKind.BACKWARD
    compute = (
        (Action(0, f, 0), Action(3, f, 0), Action(3, b, 0), Action(0, b, 0)),
        (Action(1, f, 0), Action(2, f, 0), Action(2, b, 0), Action(1, b, 0)),
    )
    table = complete_table(compute)
    check_table(table, 4, 1)
    assert {str(a) for row in table for a in row if a.kind is ActionKind.SEND_F} == {"0SEND_F0", "2SEND_F0"}
