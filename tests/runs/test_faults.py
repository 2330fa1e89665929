"""Faults as they are written."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.problems import parse_model
from simplan.runs.faults import FaultSchedule

KILL: dict[str, Any] = {"kind": "kill", "at_step": 3, "rank": 1}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({**KILL, "at_s": 2.0}, "needs one of at_step and at_s"),
        ({"kind": "kill", "at_step": 3}, "needs one of rank and node"),
        ({**KILL, "node": 1}, "needs one of rank and node"),
        ({**KILL, "for_s": 3.0}, "for_s goes with kind: slow"),
        ({**KILL, "slowdown": 2.0}, "slowdown goes with kind: slow"),
        ({**KILL, "kind": "slow", "for_s": 2.0}, "slowdown goes with kind: slow"),
        ({**KILL, "kind": "slow", "slowdown": 2.0}, "kind: slow needs for_s"),
        ({**KILL, "kind": "slow", "slowdown": 1.0, "for_s": 2.0}, "slowdown = 1.0: must be greater than 1"),
        ({**KILL, "kind": "preempt"}, "notice_s goes with kind: preempt"),
        ({**KILL, "kind": "explode"}, "kind"),
        ({**KILL, "at_step": 0}, "at_step = 0: must be at least 1"),
        ({"kind": "kill", "at_s": -1.0, "rank": 0}, "at_s = -1.0: must be at least 0"),
        ({"kind": "kill", "at_step": 3, "node": 0}, "node = 0: must be at least 1"),
    ],
)
def test_wrong_faults_are_refused(fault: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence.replace(".", r"\.")):
        parse_model(FaultSchedule, {"faults": [fault]})


def test_a_schedule_is_not_empty() -> None:
    with pytest.raises(SpecError, match="faults"):
        parse_model(FaultSchedule, {"faults": []})
    assert parse_model(FaultSchedule, {"faults": [KILL]}).faults[0].rank == 1
