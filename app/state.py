"""State of a session: the scenario and view values, mirrored in the address of the page.

Streamlit discards widgets of pages that are not shown. Values are therefore stored here, and widgets are bound to them.
"""

from __future__ import annotations

import copy
from typing import Any

import streamlit as st
import yaml

from app.link import MAX_CHARS, ShareLink, decode, encode, num_chars

__all__ = ["START", "document", "document_text", "open_link", "set_document", "set_view", "view", "write_link"]

START: dict[str, Any] = {
    "model": {"preset": "llama3-70b", "seq_len": 8192},
    "cluster": {"preset": "dgx-h100", "num_devices": 64},
    "training": {"global_batch_size": 128, "precision": "bf16", "optimizer": "adamw"},
    "software": "torch",
    "plan": {"tp": 8, "dp_shard": 8, "recompute": "full"},
}
"""Scenario of a session that starts without a link."""

_DOCUMENT, _VIEW, _WRITTEN = "simplan document", "simplan view", "simplan link"


def document() -> dict[str, Any]:
    """The scenario as plain data; a copy, to change and to give to ``set_document``."""
    found: dict[str, Any] = copy.deepcopy(st.session_state.get(_DOCUMENT, START))
    return found


def set_document(data: dict[str, Any]) -> None:
    """Replaces the scenario of the session."""
    st.session_state[_DOCUMENT] = copy.deepcopy(data)


def document_text(data: dict[str, Any]) -> str:
    """YAML text of a scenario; a missing name is derived from the content."""
    named = data if "name" in data else {"name": _name(data), **data}
    text: str = yaml.safe_dump(named, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return text


def _name(data: dict[str, Any]) -> str:
    """E.g. ``llama3-70b-64-dgx-h100``."""
    sections = [section if isinstance(section := data.get(key), dict) else {} for key in ("model", "cluster")]
    model, cluster = sections
    parts = (model.get("preset", model.get("name")), cluster.get("num_devices"), cluster.get("preset"))
    return "-".join(str(part)[:60] for part in parts if part) or "scenario"


def view(name: str, default: Any = None) -> Any:
    """View value of a page by name."""
    return st.session_state.get(_VIEW, {}).get(name, default)


def set_view(name: str, value: Any) -> None:
    """Stores a view value, which must be short plain data; None deletes it."""
    kept = {key: other for key, other in st.session_state.get(_VIEW, {}).items() if key != name}
    st.session_state[_VIEW] = kept if value is None else kept | {name: value}


def open_link() -> None:
    """Loads the state of the address, unless this session wrote that address."""
    query = dict(st.query_params)
    if not query or query == st.session_state.get(_WRITTEN):
        return
    link = decode(query)
    if link.document:
        set_document(link.document)
    st.session_state[_VIEW] = link.view


def write_link() -> bool:
    """Writes the state into the address; False, with an empty query, when the state is too long."""
    query = encode(ShareLink(document(), st.session_state.get(_VIEW, {})))
    fits = num_chars(query) <= MAX_CHARS
    query = query if fits else {}
    if dict(st.query_params) != query:
        st.query_params.from_dict(query)
    st.session_state[_WRITTEN] = query
    return fits
