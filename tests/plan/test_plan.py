"""Fields of a plan that follow from others."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from simplan.plan.plan import ParallelPlan


def test_one_number_of_layers_is_that_of_every_stage() -> None:
    plan = ParallelPlan.model_validate({"pp": 2, "virtual_stages": 2, "stage_layers": 3})
    assert plan == ParallelPlan(pp=2, virtual_stages=2, stage_layers=(3, 3, 3, 3))
    for wrong in (True, -1, 1.5, "3"):
        with pytest.raises(ValidationError, match="stage_layers"):
            ParallelPlan.model_validate({"pp": 2, "stage_layers": wrong})
