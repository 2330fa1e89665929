"""Widgets bound to keys of the scenario or to view values: they show the stored value, and a change updates it.

Further keyword arguments of a function are those of the Streamlit widget, e.g. ``help`` and ``format_func``. The help
of a widget for a key of the scenario is the description of the key, as ``simplan show`` prints it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import streamlit as st

from app import state
from app.fitting import Document, with_value
from app.page import escaped
from simplan.goodput.sections import SECTIONS
from simplan.report.plan_fields import plan_fields
from simplan.report.section_fields import model_fields, training_fields
from simplan.scenario.schema import cluster_fields
from simplan.software.software import SoftwareSpec

Path = tuple[str, ...]
_Changed = Callable[[], None]
_Number = TypeVar("_Number", int, float)
_MAX_WHOLE = 2**53 - 1  # of a browser
_MAX_QUANTITY = 1e300


def get(path: Path, default: Any = None) -> Any:
    """Value of the scenario at a path of keys."""
    data: Any = state.current()
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return copy.deepcopy(data)


def put(path: Path, value: Any) -> None:
    """Changes the scenario at a path of keys; None takes the key away."""
    state.set_document(with_value(state.document(), path, value))


@cache
def _descriptions() -> dict[Path, str]:
    """Description of each key of a scenario."""
    sections = {
        "model": model_fields(),
        "cluster": cluster_fields(),
        "training": training_fields(),
        "plan": plan_fields(),
    }
    options = {name: field.description or "" for name, field in SoftwareSpec.model_fields.items()}
    described: dict[Path, str] = {("software", name): text for name, text in options.items()}
    for name, spec in SECTIONS.items():
        described |= {(name, key): field.description or "" for key, field in spec.model_fields.items()}
    return described | {(name, row["name"]): row["description"] for name, rows in sections.items() for row in rows}


def about(path: Path, *more: str, description: str = "") -> str:
    """Help of a widget for a key of the scenario.

    Args:
        more: Further sentences; empty ones are left out.
        description: Description of a key of a topology, which depends on its kind.
    """
    texts = (description or _descriptions()[path], *more)
    return f"`{'.'.join(path)}`: " + escaped(". ".join(text.rstrip(".") for text in texts if text))


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
    """
    value, options = get(path, default), [*options]
    if not _is_among(value, options):
        if isinstance(value, str | int | float) and value != "":
            options.append(value)
        else:
            value = default if _is_among(default, options) else options[0]
    key = _bind(path, value)
    more = _with_help(path, more) | {"key": key, "on_change": _store, "args": (path, key, then)}
    if slider and len(options) > 1:
        ordered = sorted(options) if all(isinstance(option, int) for option in options) else options
        return st.select_slider(label, ordered, **more)
    return st.selectbox(label, options, **more)


def number(
    label: str,
    path: Path,
    default: int | None,
    *,
    change: Callable[[Document, Any], Document] | None = None,
    then: _Changed | None = None,
    **more: Any,
) -> None:
    """Widget for a whole number of the scenario; empty without a value and a default, and for no such number.

    The widget has no limits: it would ignore a number beyond them, and simplan says which ones it takes.

    Args:
        label: Label of the widget.
        path: Keys in the scenario.
        default: Meaning of a missing key.
        change: Scenario with another value, of which other keys depend; None for one that changes the key alone.
        then: Called after a change; None for no call.
    """
    value = get(path, default)
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_WHOLE
    key = _bind(path, value if usable else None)
    more = _with_help(path, more)
    st.number_input(label, step=1, value=None, key=key, on_change=_store, args=(path, key, then, change), **more)


def quantity(
    label: str,
    path: Path,
    default: float | None,
    *,
    scale: float = 1.0,
    change: Callable[[Document, Any], Document] | None = None,
    then: _Changed | None = None,
    **more: Any,
) -> None:
    """Widget for a number of the scenario, in units of ``scale``; empty where ``number`` is, see there for arguments.

    Without a ``change``, 0 takes the key away.
    """
    value = get(path, default)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_QUANTITY
    key = _bind(path, float(value) / scale if usable else None)
    more = _with_help(path, more)
    args = (path, key, then, change, scale)
    st.number_input(label, value=None, key=key, on_change=_store, args=args, **more)


def switch(label: str, path: Path, default: bool, *, then: _Changed | None = None, **more: Any) -> None:
    """Widget for true or false of a scenario key."""
    value = get(path, default)
    key = _bind(path, value if isinstance(value, bool) else default)
    st.toggle(label, key=key, on_change=_store, args=(path, key, then), **_with_help(path, more))


def remembered_choice(
    label: str,
    name: str,
    options: Sequence[Any],
    default: Any,
    *,
    widget: Callable[..., Any] = st.selectbox,
    **more: Any,
) -> Any:
    """Widget for one of several view values.

    Args:
        label: Label of the widget.
        name: Name of the view value.
        options: Values to choose from.
        default: Value without a stored one.
        widget: Streamlit's function for the widget, e.g. ``st.select_slider``.
        more: Further arguments of the widget.
    """
    value = state.view(name, default)
    key = f"view:{name}"
    st.session_state[key] = value if _is_among(value, options) else default
    return widget(label, options, key=key, on_change=_remember, args=(name, key, default), **more)


def remembered_choices(
    label: str, name: str, options: Sequence[Any], default: Sequence[Any] = (), **more: Any
) -> list[Any]:
    """Widget for any number of several view values; the default without a stored one."""
    kept = state.view(name)
    valid = [value for value in kept if _is_among(value, options)] if isinstance(kept, list) else []
    key = f"view:{name}"
    st.session_state[key] = valid or list(default)
    values: list[Any] = st.multiselect(label, options, key=key, on_change=_remember, args=(name, key, []), **more)
    return values or list(default)


def remembered_switch(label: str, name: str, **more: Any) -> bool:
    """Widget for a view value that is true or false, by default false."""
    key = f"view:{name}"
    st.session_state[key] = state.view(name) is True
    return st.toggle(label, key=key, on_change=_remember, args=(name, key, False), **more)


def remembered_number(
    label: str, name: str, default: _Number, *, least: float = 0.0, most: float = 1e15, **more: Any
) -> _Number:
    """Widget for a view value that is a number; a whole one if the default is."""
    key, kind = f"view:{name}", type(default)
    kept = state.view(name, default)
    usable = isinstance(kept, int | kind) and not isinstance(kept, bool) and least <= kept <= most
    st.session_state[key] = kind(kept) if usable else default
    limits = kind(least), kind(most)
    value: _Number = st.number_input(label, *limits, key=key, on_change=_remember, args=(name, key, default), **more)
    return value


def _with_help(path: Path, more: dict[str, Any]) -> dict[str, Any]:
    return more if "help" in more else {**more, "help": about(path)}


def _bind(path: Path, value: Any) -> str:
    """Sets the widget of a scenario key to a value; returns the key of the widget."""
    key = "document:" + ".".join(path)
    st.session_state[key] = value
    return key


def _store(
    path: Path,
    key: str,
    then: _Changed | None,
    change: Callable[[Document, Any], Document] | None = None,
    scale: float | None = None,
) -> None:
    """Stores the value of a widget; one of a scale in units of the scenario, and without a ``change`` 0 as none."""
    value = st.session_state[key]
    if scale is not None and value is not None:
        value = value * scale or (None if change is None else 0.0)
    document = state.document()
    state.set_document(with_value(document, path, value) if change is None else change(document, value))
    if then is not None:
        then()


def _remember(name: str, key: str, default: Any) -> None:
    value = st.session_state[key]
    state.set_view(name, None if value == default else value)


def _is_among(value: Any, options: Sequence[Any]) -> bool:
    return any(type(value) is type(option) and value == option for option in options)
