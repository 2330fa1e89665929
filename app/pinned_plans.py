"""Pinned plans of a session: part of the page's address, so that a link contains them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from app import state
from simplan.errors import SpecError
from simplan.plan.plan import ParallelPlan
from simplan.problems import parse_model
from simplan.report.search import search_plan_words
from simplan.scenario import plan_section, with_software
from simplan.search import RankedPlan, SearchSpace
from simplan.search.space import software_options

MAX_PINNED = 6
"""Maximum number of pinned plans, limited by the length of a link."""

_NAME = "pins"
_OTHERS = ("search", "expect")


class PinnedPlan(NamedTuple):
    """A plan, and the options of the software that its search varies."""

    plan: ParallelPlan
    software: Mapping[str, Any] = MappingProxyType({})


def pinned() -> dict[str, PinnedPlan]:
    """Pinned plans by their text; invalid plans of a link are skipped."""
    stored = state.view(_NAME, [])
    plans: dict[str, PinnedPlan] = {}
    for data in stored if isinstance(stored, list) else []:
        with suppress(SpecError):
            one = _read(data)
            plans[search_plan_words(*one)] = one
    return dict(list(plans.items())[:MAX_PINNED])


def pin(plan: PinnedPlan) -> None:
    """Pins a plan; removes the oldest pinned plan if there are ``MAX_PINNED``."""
    plans = [other for other in pinned().values() if other != plan]
    _store([*plans, plan][-MAX_PINNED:])


def unpin(key: str) -> None:
    """Unpins the plan with a text."""
    _store([plan for other, plan in pinned().items() if other != key])


def with_plan(document: dict[str, Any], one: PinnedPlan | RankedPlan) -> dict[str, Any]:
    """The scenario with another plan and its software, on the number of devices that the plan needs."""
    cluster = {key: value for key, value in dict(document.get("cluster") or {}).items() if key != "num_nodes"}
    return {
        **{key: value for key, value in with_software(document, one.software).items() if key not in _OTHERS},
        "cluster": cluster | {"num_devices": one.plan.num_devices},
        "plan": plan_section(one.plan),
    }


def _store(plans: list[PinnedPlan]) -> None:
    sections = [plan_section(plan) | ({"software": dict(software)} if software else {}) for plan, software in plans]
    state.set_view(_NAME, sections or None)


def _read(data: Any) -> PinnedPlan:
    """A stored plan.

    Raises:
        SpecError: It is no plan, or a search does not vary such an option of the software.
    """
    if not isinstance(data, dict) or "software" not in data:
        return PinnedPlan(parse_model(ParallelPlan, data))
    plan = parse_model(ParallelPlan, {key: value for key, value in data.items() if key != "software"})
    asked = parse_model(SearchSpace, data["software"])  # one value is a range of one
    return PinnedPlan(plan, {name: value for options in software_options(asked) for name, value in options})
