"""Scenario documents as YAML text with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from simplan.goodput.sections import SECTIONS

_PLAIN = re.compile(r"[A-Za-z][\w./+-]*")
_NOT_PLAIN = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_KEYS = {
    "model": "simplan show model",
    "cluster": "simplan show cluster",
    "training": "simplan show training",
    "plan": "simplan show plan",
    "search": "simplan show search-space",
    **dict.fromkeys(SECTIONS, "simplan show run"),
}
"""Commands that list the keys of a section."""


def scenario_text(document: Mapping[str, Any], header: str, notes: Mapping[tuple[str, ...], str] | None = None) -> str:
    """Text of a scenario file, a key of a section per line.

    Args:
        document: Data of the scenario.
        header: Comment at the top, without ``#``.
        notes: Path of a key -> comment after its value.
    """
    lines = [f"# {line}" for line in header.splitlines()]
    for section, value in document.items():
        lines += _section(section, value, notes or {})
    return "\n".join(lines) + "\n"


def _section(section: str, value: Any, notes: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    def noted(path: tuple[str, ...]) -> str:
        return f"  # {notes[path]}" if path in notes else ""

    command = _KEYS.get(section)
    keys = f"  # keys: {command}" if command else ""
    if isinstance(value, dict) and value:
        yield f"{_key(section)}:{keys}"
        value = {"preset": value["preset"]} | value if "preset" in value else value
        yield from (f"  {_key(key)}: {flow_text(inside)}{noted((section, key))}" for key, inside in value.items())
    elif section == "expect" and isinstance(value, list | tuple) and value:
        yield f"{section}:"
        yield from (f"  - {flow_text(inside)}" for inside in value)
    else:
        yield f"{_key(section)}: {flow_text(value)}{noted((section,)) or keys}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key) and key not in _NOT_PLAIN else json.dumps(key)


def flow_text(value: Any) -> str:
    """Value on one line, as YAML and without quotes where words need none."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))}: {flow_text(inside)}" for key, inside in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_text, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN:
        return value
    return json.dumps(value, ensure_ascii=False)
