"""Widgets bound to the scenario and to view values: they show the stored value, and a change updates it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from app import state

__all__ = ["choice", "get", "kept_number", "number", "put", "remembered_choice", "remembered_number", "switch"]

Path = tuple[str, ...]
_Changed = Callable[[], None]


def get(path: Path, default: Any = None) -> Any:
    """Value of the scenario at a path of keys."""
    data: Any = state.document()
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data


def put(path: Path, value: Any) -> None:
    """Changes the scenario at a path of keys; None takes the key away."""
    document = state.document()
    inside = document
    for key in path[:-1]:
        if not isinstance(inside.get(key), dict):
            inside[key] = {}
        inside = inside[key]
    if value is None:
        inside.pop(path[-1], None)
    else:
        inside[path[-1]] = value
    state.set_document(document)


def choice(
    label: str,
    path: Path,
    options: Sequence[Any],
    default: Any,
    *,
    slider: bool = False,
    then: _Changed | None = None,
    **more: Any,
) -> Any:
    """Widget for one of several values of a scenario key; offers the current value even if it is not in the list.

    Args:
        label: Label of the widget.
        path: Keys in the scenario.
        options: Values to choose from.
        default: Meaning of a missing key.
        slider: Show a slider instead of a list.
        then: Called after a change; None for no call.
        more: Further arguments of the Streamlit widget, e.g. ``help`` and ``format_func``.
    """
    value = get(path, default)
    kept = [*options] if _is_among(value, options) else [*options, *([value] if _is_plain(value) else [])]
    if not _is_among(value, kept):
        value = default if _is_among(default, kept) else kept[0]
    key = _key(path)
    st.session_state[key] = value
    if slider and len(kept) > 1:
        ordered = sorted(kept) if all(isinstance(option, int) for option in kept) else kept
        return st.select_slider(label, ordered, key=key, on_change=_store, args=(path, key, then), **more)
    return st.selectbox(label, kept, key=key, on_change=_store, args=(path, key, then), **more)


def number(
    label: str,
    path: Path,
    default: int | None,
    *,
    least: int = 1,
    most: int = 10**9,
    then: _Changed | None = None,
    **more: Any,
) -> int | None:
    """A whole number of the scenario; empty where it says none and there is no default."""
    value = get(path, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        value = default
    key = _key(path)
    st.session_state[key] = value
    found: int | None = st.number_input(
        label, least, most, step=1, key=key, on_change=_store, args=(path, key, then), **more
    )
    return found


def switch(label: str, path: Path, default: bool, **more: Any) -> bool:
    """Yes or no."""
    value = get(path, default)
    key = _key(path)
    st.session_state[key] = value if isinstance(value, bool) else default
    return st.toggle(label, key=key, on_change=_store, args=(path, key, None), **more)


def remembered_choice(label: str, name: str, options: Sequence[Any], default: Any, **more: Any) -> Any:
    """One of several values that a page remembers."""
    value = state.view(name, default)
    key = f"view:{name}"
    st.session_state[key] = value if _is_among(value, options) else default
    return st.selectbox(label, options, key=key, on_change=_remember, args=(name, key, default), **more)


def kept_number(name: str, default: float, *, least: float = 0.0, most: float = 1e15) -> float:
    """View value that is a number, without a widget; the default if it is not a number within the limits."""
    value = state.view(name, default)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable and least <= value <= most else default


def remembered_number(
    label: str, name: str, default: float, *, least: float = 0.0, most: float = 1e15, **more: Any
) -> float:
    """A number that a page remembers."""
    key = f"view:{name}"
    st.session_state[key] = kept_number(name, default, least=least, most=most)
    found: float = st.number_input(label, least, most, key=key, on_change=_remember, args=(name, key, default), **more)
    return found


def _key(path: Path) -> str:
    return "document:" + ".".join(path)


def _store(path: Path, key: str, then: _Changed | None) -> None:
    put(path, st.session_state[key])
    if then is not None:
        then()


def _remember(name: str, key: str, default: Any) -> None:
    value = st.session_state[key]
    state.set_view(name, None if value == default else value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _is_among(value: Any, options: Sequence[Any]) -> bool:
    return any(type(value) is type(option) and value == option for option in options)
