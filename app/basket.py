"""Pinned plans of a session: part of the page's address, so that a link contains them."""

from __future__ import annotations

from typing import Any

from app import state
from simplan.errors import SpecError
from simplan.plan.plan import ParallelPlan
from simplan.problems import parse_model
from simplan.report.search import search_plan_words
from simplan.scenario import plan_section

__all__ = ["MOST_PINNED", "key_of", "pin", "pinned", "unpin", "with_plan"]

MOST_PINNED = 6
"""Maximum number of pinned plans, limited by the length of a link."""

_NAME = "pins"


def pinned() -> dict[str, ParallelPlan]:
    """Pinned plans by their text; invalid plans of a link are skipped."""
    given = state.view(_NAME, [])
    found: dict[str, ParallelPlan] = {}
    for data in given if isinstance(given, list) else []:
        try:
            plan = parse_model(ParallelPlan, data)
        except SpecError:
            continue
        found[key_of(plan)] = plan
    return dict(list(found.items())[:MOST_PINNED])


def pin(plan: ParallelPlan) -> None:
    """Pins a plan; removes the oldest pinned plan if there are ``MOST_PINNED``."""
    plans = [other for key, other in pinned().items() if key != key_of(plan)]
    _keep([*plans, plan][-MOST_PINNED:])


def unpin(key: str) -> None:
    """Unpins a plan."""
    _keep([plan for other, plan in pinned().items() if other != key])


def key_of(plan: ParallelPlan) -> str:
    """Text of a plan, its key."""
    return search_plan_words(plan)


def with_plan(document: dict[str, Any], plan: ParallelPlan) -> dict[str, Any]:
    """The scenario with another plan, on the number of devices that the plan needs."""
    cluster = {key: value for key, value in dict(document.get("cluster") or {}).items() if key != "num_nodes"}
    return {
        **{key: value for key, value in document.items() if key not in ("search", "expect")},
        "cluster": cluster | {"num_devices": plan.num_devices},
        "plan": plan_section(plan),
    }


def _keep(plans: list[ParallelPlan]) -> None:
    state.set_view(_NAME, [plan_section(plan) for plan in plans] or None)
