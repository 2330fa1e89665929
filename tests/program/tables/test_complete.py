"""What is added to compute actions: communications, gathers, reductions, against torch's own lowering."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.program.action import Action, ActionKind, Table, parse_table
from simplan.program.schedules import PipelineShape, interleaved_1f1b, one_f_one_b
from simplan.program.tables.check import check_table
from simplan.program.tables.complete import Unshard, complete_table
from tests.program.tables.tables import compute_tables

MESSAGES = (ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B)
shapes = st.builds(PipelineShape, st.integers(1, 4), st.integers(1, 9), st.integers(1, 6))


def without(table: Table, *kinds: ActionKind) -> Table:
    return tuple(tuple(action for action in row if action.kind not in kinds) for row in table)


def in_order(row: list[str]) -> list[str]:
    """Of neighbouring RESHARDs, which only free, torch leaves the order to a set; here they are sorted."""
    runs = groupby(row, key=lambda text: text.endswith("RESHARD"))
    return [text for is_reshard, run in runs for text in (sorted(run) if is_reshard else run)]


def test_completed_1f1b_of_two_ranks() -> None:
    """A receive is posted when the sender starts to make its data, REDUCE_GRAD and OPTIM end the row."""
    first, last = (" ".join(map(str, row)) for row in complete_table(one_f_one_b(PipelineShape(2, 2))))
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0OPTIM"
    assert last == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1OPTIM"


@pytest.mark.parametrize("unshard", ["once", "window"])
def test_a_stage_is_gathered_before_anything_and_let_go_after_its_reduction(unshard: Unshard) -> None:
    _, last = (" ".join(map(str, row)) for row in complete_table(one_f_one_b(PipelineShape(2, 2)), unshard=unshard))
    assert last == "1UNSHARD 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD 1OPTIM"


def test_stages_of_one_rank_are_gathered_once_in_the_order_of_their_use() -> None:
    (row, _) = complete_table(interleaved_1f1b(PipelineShape(2, 2, 4)), unshard="once")
    sharding = [str(action) for action in row if action.kind in (ActionKind.UNSHARD, ActionKind.RESHARD)]
    assert sharding == [f"{s}UNSHARD" for s in (0, 2, 4, 6)] + [f"{s}RESHARD" for s in (6, 4, 2, 0)]
    assert [str(action) for action in row[:4]] == sharding[:4]


@given(shapes.map(interleaved_1f1b) | compute_tables())
def test_gathers_and_reductions_are_torchs(compute: Table) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    num_microbatches = 1 + max(action.microbatch or 0 for action in compute[0])
    ours = without(complete_table(compute, unshard="window"), *MESSAGES, ActionKind.OPTIM)
    for row, our_row in zip(compute, ours, strict=True):
        gathered = schedules._add_unshard_reshard([schedules._Action.from_str(str(action)) for action in row])
        theirs = schedules._add_reduce_grad(gathered, num_microbatches)
        assert in_order([str(action) for action in our_row]) == in_order([str(action) for action in theirs])


@given(shapes.map(interleaved_1f1b), st.sampled_from(["once", "window"]))
def test_gathers_leave_the_rest_as_it_is(compute: Table, unshard: Unshard) -> None:
    gathered = complete_table(compute, unshard=unshard)
    assert without(gathered, ActionKind.UNSHARD, ActionKind.RESHARD) == complete_table(compute)


@given(shapes.map(interleaved_1f1b))
def test_torchs_simulator_runs_completed_tables_to_their_end(compute: Table) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    num_ranks = len(compute)
    complete = without(complete_table(compute), ActionKind.REDUCE_GRAD, ActionKind.OPTIM)
    rows = {rank: [schedules._Action.from_str(str(action)) for action in row] for rank, row in enumerate(complete)}
    num_stages = 1 + max(action.stage for row in compute for action in row)
    schedules._simulate_comms_compute(rows, lambda stage: stage % num_ranks, num_stages)  # raises when stuck


def test_stages_of_one_rank_hand_over_without_communications() -> None:
    """A V: stages 0 and 3 on rank 0, 1 and 2 on rank 1."""
    table = complete_table(parse_table([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]))
    check_table(table, 4, 1)
    assert [action for row in table for action in row if action.kind is ActionKind.SEND_F] == [
        Action(0, ActionKind.SEND_F, 0),
        Action(2, ActionKind.SEND_F, 0),
    ]
