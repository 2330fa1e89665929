"""Pinned plans of a session: part of the page's address, so that a link contains them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from app import state
from simplan.errors import SpecError
from simplan.plan.plan import ParallelPlan
from simplan.problems import parse_model
from simplan.report.search import search_plan_words
from simplan.scenario import plan_section

MAX_PINNED = 6
"""Maximum number of pinned plans, limited by the length of a link."""

_NAME = "pins"


def pinned() -> dict[str, ParallelPlan]:
    """Pinned plans by their text; invalid plans of a link are skipped."""
    stored = state.view(_NAME, [])
    plans: dict[str, ParallelPlan] = {}
    for data in stored if isinstance(stored, list) else []:
        with suppress(SpecError):
            plan = parse_model(ParallelPlan, data)
            plans[search_plan_words(plan)] = plan
    return dict(list(plans.items())[:MAX_PINNED])


def pin(plan: ParallelPlan) -> None:
    """Pins a plan; removes the oldest pinned plan if there are ``MAX_PINNED``."""
    plans = [other for other in pinned().values() if other != plan]
    _store([*plans, plan][-MAX_PINNED:])


def unpin(key: str) -> None:
    """Unpins the plan with a text."""
    _store([plan for other, plan in pinned().items() if other != key])


def with_plan(document: dict[str, Any], plan: ParallelPlan) -> dict[str, Any]:
    """The scenario with another plan, on the number of devices that the plan needs."""
    cluster = {key: value for key, value in dict(document.get("cluster") or {}).items() if key != "num_nodes"}
    return {
        **{key: value for key, value in document.items() if key not in ("search", "expect")},
        "cluster": cluster | {"num_devices": plan.num_devices},
        "plan": plan_section(plan),
    }


def _store(plans: list[ParallelPlan]) -> None:
    state.set_view(_NAME, [plan_section(plan) for plan in plans] or None)
