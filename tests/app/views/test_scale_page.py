"""The page Scale: no combination of inputs shows an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.figures.scale import AXES
from tests.app.questions import TINY
from tests.app.views.pages import complaints, opened_in_session

PLANS = [{"dp_shard": 4}, {"dp_replicate": 2, "pp": 2}, {"tp": 4}, {"cp": 2, "dp_shard": 2}, {"tp": 3}, {}, 7, None]
VIEWS = st.fixed_dictionaries(
    {},
    optional={
        "axis": st.sampled_from([*AXES, "nonsense"]),
        "batch": st.sampled_from(["same", "follows", 1]),
        "slower": st.sampled_from([5, 10, 100, 7, "x"]),
        "ways": st.booleans(),
    },
)


def opened(plan: Any, view: dict[str, Any]) -> list[str]:
    return complaints(opened_in_session("scale", {**TINY, "plan": plan}, view))


def test_the_page_opens() -> None:
    assert opened({"dp_replicate": 2, "pp": 2}, {}) == []


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PLANS), VIEWS)
def test_no_view_shows_an_exception(plan: Any, view: dict[str, Any]) -> None:
    assert opened(plan, view) == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PLANS), VIEWS)
def test_no_view_of_many_shows_an_exception(plan: Any, view: dict[str, Any]) -> None:
    assert opened(plan, view) == []
