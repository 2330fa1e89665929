"""State of a session: the scenario and view values, mirrored in the address of the page.

Streamlit discards widgets of pages that are not shown. Values are therefore stored here, and widgets are bound to them.
An address is ``?model.preset=llama3-8b&plan.dp_shard=8&v.price=2.5``: keys are those of the scenario file, as
``section.key``, view values have the section ``v``, and values are plain text or JSON. Every address decodes to a
document, which simplan then checks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import streamlit as st

MAX_CHARS = 6_000
"""Maximum length of an address; browsers and proxies cut longer ones."""

MAX_PINNED = 5
"""Maximum number of pinned scenarios, which are compared with the current one and are part of the address."""

_VIEW_SECTION, _PINNED = "v", "scenarios"
_MAX_KEYS = 300


def encode(document: Mapping[str, Any], view: Mapping[str, Any]) -> dict[str, str]:
    """Query of an address for a scenario as plain data and view values by name."""
    query: dict[str, str] = {}
    for section, value in document.items():
        # an empty section is one value; so is one with keys that are not words
        if isinstance(value, dict) and value and all(isinstance(key, str) and key for key in value):
            query |= {f"{section}.{key}": _text(inner) for key, inner in value.items()}
        else:
            query[section] = _text(value)
    return query | {f"{_VIEW_SECTION}.{key}": _text(value) for key, value in view.items()}


def decode(query: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scenario and view values of a query; both are empty for a query that is too long."""
    document: dict[str, Any] = {}
    view: dict[str, Any] = {}
    if len(query) > _MAX_KEYS or num_chars(query) > 4 * MAX_CHARS:
        return document, view
    for key, text in query.items():
        section, dot, rest = key.partition(".")
        value = _value(text)
        if not dot:
            document[section] = value
        elif section == _VIEW_SECTION:
            view[rest] = value
        else:
            keys = document.setdefault(section, {})
            if isinstance(keys, dict):
                keys[rest] = value
    return document, view


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


START: dict[str, Any] = {
    "model": {"preset": "llama3-70b", "seq_len": 8192},
    "cluster": {"preset": "dgx-h100", "num_devices": 64},
    "training": {"global_batch_size": 128, "precision": "bf16", "optimizer": "adamw"},
    "software": "torch",
    "plan": {"dp_shard": 64, "microbatch_size": 2, "recompute": "full"},
}
"""Scenario of a session that starts without a link: its plan is within 1 % of the best one that a search finds."""

USUAL: dict[str, Any] = START | {"plan": {"tp": 8, "dp_shard": 8, "recompute": "full"}}
"""The start with a plan that many write down first, tensor parallelism over each node, to compare it with."""

_DOCUMENT, _VIEW, _WRITTEN = "simplan document", "simplan view", "simplan link"


def current() -> dict[str, Any]:
    """The scenario as plain data, to read only."""
    document: dict[str, Any] = st.session_state.get(_DOCUMENT, START)
    return document


def document() -> dict[str, Any]:
    """A copy of the scenario, to change and to give to ``set_document``."""
    return copy.deepcopy(current())


def set_document(data: dict[str, Any]) -> None:
    """Replaces the scenario of the session."""
    st.session_state[_DOCUMENT] = copy.deepcopy(data)


def view(name: str, default: Any = None) -> Any:
    """View value of a page by name."""
    return st.session_state.get(_VIEW, {}).get(name, default)


def set_view(name: str, value: Any) -> None:
    """Stores a view value, which must be short plain data; None deletes it."""
    kept = {key: other for key, other in st.session_state.get(_VIEW, {}).items() if key != name}
    st.session_state[_VIEW] = kept if value is None else kept | {name: value}


def pinned() -> list[dict[str, Any]]:
    """Pinned scenarios, oldest first; skips entries of a link that are no mappings."""
    stored = view(_PINNED, [])
    return [data for data in stored if isinstance(data, dict)][:MAX_PINNED] if isinstance(stored, list) else []


def pin(data: Mapping[str, Any]) -> None:
    """Pins a scenario; removes the oldest one if there are ``MAX_PINNED``."""
    scenario = {key: value for key, value in data.items() if key not in ("search", "expect")}
    set_view(_PINNED, [*(other for other in pinned() if other != scenario), scenario][-MAX_PINNED:])


def unpin(data: Mapping[str, Any]) -> None:
    """Unpins a scenario."""
    set_view(_PINNED, [other for other in pinned() if other != data] or None)


def open_link() -> None:
    """Loads the state of the address, unless this session wrote that address."""
    query = dict(st.query_params)
    if not query or query == st.session_state.get(_WRITTEN):
        return
    linked, st.session_state[_VIEW] = decode(query)
    if linked:
        set_document(linked)


def write_link() -> bool:
    """Writes the state into the address; False, with an empty query, when the state is too long."""
    query = encode(document(), st.session_state.get(_VIEW, {}))
    fits = num_chars(query) <= MAX_CHARS
    query = query if fits else {}
    if dict(st.query_params) != query:
        st.query_params.from_dict(query)
    st.session_state[_WRITTEN] = query
    return fits
