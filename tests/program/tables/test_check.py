"""The static check: what is wrong is found and said, what is right runs to its end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.errors import ProgramError
from simplan.program.action import Action, ActionKind, Table, parse_table
from simplan.program.schedules import PipelineShape, gpipe, one_f_one_b
from simplan.program.tables.check import check_table
from simplan.program.tables.complete import complete_table
from tests.program.tables.tables import compute_tables

FIRST = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0OPTIM"
LAST = "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1OPTIM"


def table(first: str = FIRST, last: str = LAST) -> Table:
    return parse_table([first.split(), last.split()])


def test_the_table_the_others_are_made_from_is_right() -> None:
    check_table(table(), 2, 2)


@pytest.mark.parametrize(
    ("first", "last", "communication"),
    [
        (FIRST.replace("0F0", "0F0 0F0"), LAST, "action 0F0 occurs 2 times"),
        (FIRST.replace("0B1 ", ""), LAST, "action 0B1 is missing"),
        (FIRST.replace("0SEND_F1 ", ""), LAST, "action 0SEND_F1 is missing"),
        (FIRST, LAST.replace("1REDUCE_GRAD ", ""), "action 1REDUCE_GRAD is missing"),
        (FIRST.replace(" 0OPTIM", ""), LAST, "rank 0 has 0 OPTIM actions"),
        (FIRST.replace("0F1", "0F1 0F7"), LAST, "action 0F7 does not belong"),
        (FIRST.replace("0F1", "0F1 1F7"), LAST, "action 1F7 is on rank 0 but stage 1 has most actions on rank 1"),
        (FIRST.replace("0F0 0SEND_F0", "0SEND_F0 0F0"), LAST, "0SEND_F0 comes before 0F0"),
        (FIRST, LAST.replace("1RECV_F0 1RECV_F1 1F0", "1RECV_F1 1F0 1RECV_F0"), "1F0 comes before 1RECV_F0"),
        (FIRST, LAST.replace("1F0 1B0", "1B0 1F0"), "1B0 comes before 1F0"),
        (FIRST.replace("0B1 0REDUCE_GRAD", "0REDUCE_GRAD 0B1"), LAST, "0REDUCE_GRAD comes before 0B1"),
        (FIRST.replace("0REDUCE_GRAD 0OPTIM", "0OPTIM 0REDUCE_GRAD"), LAST, "0OPTIM is not the last action"),
        (f"7UNSHARD {FIRST}", LAST, "action 7UNSHARD does not belong"),
        (f"0UNSHARD {FIRST}", LAST, "rank 0: stage 0 has no RESHARD after its last UNSHARD"),
        (f"0UNSHARD 0UNSHARD {FIRST}", LAST, "0UNSHARD comes twice without a RESHARD between"),
        (f"0UNSHARD 0RESHARD {FIRST}", LAST, "0RESHARD without an UNSHARD and a computation before it"),
        (f"0RESHARD {FIRST}", LAST, "0RESHARD without an UNSHARD and a computation before it"),
        (FIRST.replace("0F1", "0UNSHARD 0F1 0RESHARD"), LAST, "0F0 is outside of an UNSHARD and a RESHARD"),
    ],
)
def test_violations_are_named(first: str, last: str, communication: str) -> None:
    with pytest.raises(ProgramError, match=communication):
        check_table(table(first, last), 2, 2)


def test_a_stage_may_be_gathered_several_times() -> None:
    check_table(
        table(
            last=LAST.replace("1F0 1B0", "1UNSHARD 1F0 1B0 1RESHARD")
            .replace("1F1", "1UNSHARD 1F1")
            .replace("1REDUCE_GRAD", "1REDUCE_GRAD 1RESHARD")
        ),
        2,
        2,
    )


def test_communications_of_two_ranks_in_different_order_deadlock() -> None:
    """Each list alone is fine; on an in-order transport rank 0's receive blocks its send."""
    first = FIRST.replace("0F1 0SEND_F1 0RECV_B0 0B0", "0F1 0RECV_B0 0SEND_F1 0B0")
    expected = "deadlock: rank 0 waits at 0B0 for 1SEND_B0 on rank 1; its next transfer with rank 1 is 0RECV_B0"
    with pytest.raises(ProgramError, match=expected):
        check_table(table(first), 2, 2)


def test_actions_in_a_circle_are_refused_on_completion() -> None:
    f, b = ActionKind.FORWARD, ActionKind.BACKWARD
    rows: Table = (
        (Action(0, f, 0), Action(0, b, 0), Action(0, f, 1), Action(0, b, 1)),
        one_f_one_b(PipelineShape(2, 2))[1][::-1],
    )
    with pytest.raises(ProgramError, match="action 1B0 comes before 1F0"):
        complete_table(rows)
    rows = parse_table([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    deadlock = "wait for each other: rank 0 at 0B0 waits for 1B0 on rank 1, rank 1 at 1F1 waits for 0F1 on rank 0$"
    with pytest.raises(ProgramError, match=deadlock):
        complete_table(rows)


@given(compute_tables())
def test_completed_random_tables_pass(compute: Table) -> None:
    check_table(complete_table(compute), len(compute), max(a.microbatch or 0 for a in compute[0]) + 1)


@given(compute_tables(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_the_check_agrees_with_torch_on_shuffled_tables(compute: Table, random: object) -> None:
    """torch's own simulator refuses at least what cannot progress; whatever it refuses, the check refuses."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    complete = [list(row) for row in complete_table(compute)]
    row = complete[random.randrange(len(complete))]  # type: ignore[attr-defined]
    i, j = random.randrange(len(row)), random.randrange(len(row))  # type: ignore[attr-defined]
    row[i], row[j] = row[j], row[i]
    theirs = {
        rank: [
            schedules._Action.from_str(str(a))
            for a in actions
            if a.kind not in (ActionKind.OPTIM, ActionKind.REDUCE_GRAD)
        ]
        for rank, actions in enumerate(complete)
    }
    num_stages = len(complete)
    try:
        check_table(
            tuple(tuple(actions) for actions in complete), num_stages, max(a.microbatch or 0 for a in compute[0]) + 1
        )
    except ProgramError:
        return
    schedules._simulate_comms_compute(theirs, lambda stage: stage, num_stages)  # raises when stuck


def test_large_tables_are_checked() -> None:
    check_table(complete_table(gpipe(PipelineShape(16, 128))), 16, 128)
