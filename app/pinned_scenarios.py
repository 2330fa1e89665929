"""Pinned scenarios of a session, to compare with others: part of the page's address, so that a link contains them."""

from __future__ import annotations

from typing import Any

from app import state

MAX_SCENARIOS = 3
"""Maximum number of pinned scenarios: with the current one, four are compared."""

_NAME = "scenarios"
_LEFT_OUT = ("search", "expect")


def pinned_scenarios() -> list[dict[str, Any]]:
    """Pinned scenarios as plain data, oldest first; entries of a link that are no mappings are skipped."""
    stored = state.view(_NAME, [])
    found = [data for data in stored if isinstance(data, dict)] if isinstance(stored, list) else []
    return found[:MAX_SCENARIOS]


def pin_scenario(document: dict[str, Any]) -> None:
    """Pins a scenario; removes the oldest one if there are ``MAX_SCENARIOS``."""
    scenario = {key: value for key, value in document.items() if key not in _LEFT_OUT}
    others = [other for other in pinned_scenarios() if other != scenario]
    state.set_view(_NAME, [*others, scenario][-MAX_SCENARIOS:])


def unpin_scenario(place: int) -> None:
    """Unpins the scenario at a place of the list."""
    pinned = pinned_scenarios()
    state.set_view(_NAME, pinned[:place] + pinned[place + 1 :] or None)
