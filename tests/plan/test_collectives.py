"""Algorithms of collectives in a plan: what goes together, and its words."""

from __future__ import annotations

import pytest

from simplan.errors import SpecError
from simplan.plan.plan import ParallelPlan


@pytest.mark.parametrize(("name", "value"), [("parameter_servers", 2), ("parameter_placement", "whole")])
@pytest.mark.parametrize("other", [{}, {"all_reduce": "ring"}])
def test_settings_of_servers_without_servers_are_refused(name: str, value: object, other: dict[str, str]) -> None:
    with pytest.raises(SpecError, match=f"has {name}, and all_reduce is not parameter_server; .*remove {name}"):
        ParallelPlan().with_changes(collectives={**other, name: value})


def test_words_name_servers_and_their_placement() -> None:
    servers = {"all_reduce": "parameter_server", "parameter_servers": 3}
    for placement, words in (("parts", "(servers: 3)"), ("whole", "(servers: 3, whole parameters)")):
        plan = ParallelPlan().with_changes(collectives={**servers, "parameter_placement": placement})
        assert plan.collectives is not None
        assert plan.collectives.words == f"all_reduce by parameter_server {words}"
