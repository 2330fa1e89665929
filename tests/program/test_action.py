"""Actions and tables in text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.errors import ProgramError
from simplan.program.action import Action, ActionKind, format_table, parse_table

ACTIONS = st.builds(
    lambda stage, kind, microbatch: Action(stage, kind, microbatch if kind.per_microbatch else None),
    st.integers(0, 999),
    st.sampled_from(ActionKind),
    st.integers(0, 9999),
)


@given(st.lists(st.lists(ACTIONS, max_size=8), max_size=4))
def test_text_form_reads_back(rows: list[list[Action]]) -> None:
    table = tuple(tuple(row) for row in rows)
    assert parse_table(format_table(table)) == table


@pytest.mark.parametrize("text", ["0F1", "2SEND_F3", "1B0", "0UNSHARD", "1REDUCE_GRAD", "0I2", "0W2"])
def test_torch_reads_the_same_text(text: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs, ours = schedules._Action.from_str(text), Action.parse(text)
    assert (theirs.stage_index, theirs.microbatch_index) == (ours.stage, ours.microbatch)
    assert str(theirs) == str(ours) == text


@pytest.mark.parametrize("text", ["0F0zzz", "", "F0", "0X0", "0F", "0OPTIM3", "-1F0", "0F-1", "0F1 0F2"])
def test_what_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="action"):
        Action.parse(text)
