"""Codec between a page's state and the query of its address: ``?model.preset=llama3-8b&plan.dp_shard=8&v.price=2.5``.

Keys are those of the scenario file, as ``section.key``; view values have the section ``v``. Values are plain text or
JSON. Every address decodes to a document, which simplan then checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MAX_CHARS", "ShareLink", "decode", "encode", "num_chars"]

MAX_CHARS = 6_000
"""Of keys and values together; browsers and proxies cut longer addresses."""

_VIEW = "v"
_MAX_KEYS = 300


@dataclass(frozen=True, slots=True)
class ShareLink:
    """Decoded query of an address.

    Attributes:
        document: The scenario as plain data, the content of its YAML file.
        view: View values of pages, by name.
    """

    document: dict[str, Any] = field(default_factory=dict)
    view: dict[str, Any] = field(default_factory=dict)


def encode(link: ShareLink) -> dict[str, str]:
    """The query of an address, by key."""
    query: dict[str, str] = {}
    for section, value in link.document.items():
        # an empty section is one value; so is one with keys that are not words
        if isinstance(value, dict) and value and all(isinstance(key, str) and key for key in value):
            query |= {f"{section}.{key}": _text(inner) for key, inner in value.items()}
        else:
            query[section] = _text(value)
    return query | {f"{_VIEW}.{key}": _text(value) for key, value in link.view.items()}


def decode(query: Mapping[str, str]) -> ShareLink:
    """Decodes a query; a query that is too long yields an empty link."""
    if len(query) > _MAX_KEYS or num_chars(query) > 4 * MAX_CHARS:
        return ShareLink()
    found = ShareLink()
    for key, text in query.items():
        section, dot, rest = key.partition(".")
        value = _value(text)
        if not dot:
            found.document[section] = value
        elif section == _VIEW:
            found.view[rest] = value
        else:
            inside = found.document.setdefault(section, {})
            if isinstance(inside, dict):
                inside[rest] = value
    return found


def num_chars(query: Mapping[str, str]) -> int:
    """Length of a query."""
    return sum(len(key) + len(text) + 2 for key, text in query.items())


def _text(value: Any) -> str:
    """Plain text as it is, unless it would be read as something else."""
    if isinstance(value, str) and _value(value) == value:
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> Any:
    raise ValueError(name)
