"""``simplan show plan`` against the model that reads plans."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from simplan.plan.plan import ParallelPlan
from simplan.report.plan_fields import plan_fields

ROWS = {row["name"]: row for row in plan_fields()}


def test_every_key_is_there_and_says_what_it_is_for() -> None:
    assert list(ROWS) == list(ParallelPlan.model_fields)
    assert all(row["what for"] and row["values"] for row in ROWS.values())


@pytest.mark.parametrize("name", ROWS)
def test_values_are_what_a_plan_takes(name: str) -> None:
    """Each choice is read, and what is none is not."""
    values = ROWS[name]["values"]
    many = values.startswith("list of ")
    choices = values.removeprefix("list of ").split(", ")
    taken: list[object]
    if "and more" in values or " to " in values:
        least = int(choices[0].split()[0])
        taken, refused = [least, least + 1], least - 1
    elif values == "true, false":
        taken, refused = [True, False], 7
    elif name == "schedule":
        taken, refused = ["1f1b"], 7
    else:
        taken, refused = [*choices], 7
    for value in taken:
        ParallelPlan.model_validate({name: (value,) if many else value})
    with pytest.raises(ValidationError):
        ParallelPlan.model_validate({name: (refused,) if many else refused})


def test_defaults_are_those_of_a_plan() -> None:
    plan = ParallelPlan()
    for name, row in ROWS.items():
        value = getattr(plan, name)
        shown = "" if value is None else str(value).lower()
        assert shown in row["default"], name
