"""Boxes of the scenario form: names that people type, and values that the other settings allow; notes on changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import streamlit as st

from app import state
from app.fields import about, choice, get, switch
from app.fitting import Document, fitted, mended, objection, plan_value, valid_values, with_value
from app.last_read import with_batch_of_file
from app.page import escaped
from simplan.catalog.spelling import UNKNOWN
from simplan.errors import Problem, SpecError, did_you_mean

_NOTES = "form notes"
_MAX_LISTED = 16


def name_box(
    label: str,
    key: str,
    value: str | None,
    names: Mapping[str, str],
    change: Callable[[Document, str], tuple[Document, list[str]]],
    **more: Any,
) -> None:
    """Select box of names, which also takes names that people type; below it, what became of the last one.

    Args:
        value: Name in the scenario; None for none yet.
        names: Label of each name.
        change: Scenario with a name, and notes; raises a SpecError for a name that stands for none or for several.
    """
    st.session_state[key] = value
    st.selectbox(
        label,
        list(names),
        index=None if value is None else 0,
        key=key,
        on_change=_take_name,
        args=(key, label, names, change),
        format_func=lambda name: names.get(name, name),
        accept_new_options=True,
        filter_mode="contains",
        **more,
    )
    show_notes(key)


def _take_name(
    key: str,
    label: str,
    names: Mapping[str, str],
    change: Callable[[Document, str], tuple[Document, list[str]]],
) -> None:
    name = st.session_state[key]
    if name is None:
        return
    try:
        document, notes = change(state.document(), name)
    except SpecError as error:
        st.session_state[_NOTES] = {key: [_unclear(label, name, names, problem) for problem in error.problems]}
        return
    document, of_plan = mended(with_batch_of_file(document))
    state.set_document(document)
    st.session_state[_NOTES] = {key: notes, "plan": of_plan}


def _unclear(label: str, text: str, names: Mapping[str, str], problem: Problem) -> str:
    """Sentence on a typed name, in words of the box: every entry of its list that has these words, or the nearest ones.

    Args:
        names: Label of each name of the box.
        problem: Problem of the name; one that is about something else keeps its own sentence.
    """
    if problem.rule != UNKNOWN and not problem.rule.startswith("may be several"):
        return problem.sentence()
    listed = [name for name, shown in names.items() if _plain(text) and _plain(text) in _plain(shown)]
    if len(listed) > 1:
        more = f" and {len(listed) - _MAX_LISTED} more of the list" if len(listed) > _MAX_LISTED else ""
        return f"{text}: may be several; name one of {', '.join(listed[:_MAX_LISTED])}{more}"
    near = did_you_mean(text, names)
    return (
        f"{text}: is not in the list of {label}; {near or 'choose an entry, or write the scenario with Edit as YAML'}"
    )


def _plain(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def show_notes(place: str) -> None:
    """Notes on the last change: below a name's box, or above the plan."""
    for note in st.session_state.get(_NOTES, {}).pop(place, ()):
        st.caption(f":material/info: {escaped(note)}")


def valid_choice(
    label: str,
    name: str,
    values: Sequence[Any],
    default: Any,
    words: Callable[[Any], str | None] = str,
    *,
    more: str = "",
    then: Callable[[], None] | None = None,
) -> None:
    """Select box of a plan key, with the values that the other settings allow; the help names the others."""
    path, valid = ("plan", name), valid_values(state.current(), name, values)
    choice(
        label,
        path,
        valid,
        default,
        then=then or fit,
        format_func=lambda value: str(words(value) or value),
        help=about(path, more, _ruled_out(words(value) for value in values if value not in valid)),
    )


def open_choice(
    document: Document,
    label: str,
    path: tuple[str, ...],
    values: Sequence[Any],
    default: Any,
    default_words: str = "",
    *,
    then: Callable[[], None] | None = None,
) -> None:
    """Select box of any key, with the values that bring no new problem; disabled, with the reason, if there is one.

    Args:
        document: Scenario in which values are tried.
        default_words: Words for the value None.
    """
    value = get(path, default)
    why_not = {
        other: why
        for other in values
        if other != value and (why := objection(document, with_value(document, path, other)))
    }
    valid = [other for other in values if other not in why_not]
    reason = next(iter(why_not.values())) if len(valid) < 2 and why_not else _ruled_out(why_not)
    choice(
        label,
        path,
        valid,
        default,
        then=then,
        format_func=lambda other: f"{default_words} (default)" if other is None else str(other),
        placeholder=f"{default_words} (default)",
        disabled=len(valid) < 2,
        help=about(path, reason),
    )


def _ruled_out(values: Iterable[Any]) -> str:
    names = ", ".join(map(str, values))
    return f"Other settings rule out: {names}" if names else ""


def valid_switch(label: str, name: str) -> None:
    """Switch of a plan key; disabled if the other settings rule its other value out."""
    value = plan_value(state.current(), name) is True
    switch(label, ("plan", name), value, disabled=len(valid_values(state.current(), name, (value, not value))) < 2)


def fit() -> None:
    """Fits data parallelism to the devices."""
    state.set_document(fitted(state.document()))


def mend() -> None:
    """Replaces values of the plan that other sections no longer allow; the form tells which."""
    document, notes = mended(with_batch_of_file(state.document()))
    state.set_document(document)
    st.session_state[_NOTES] = {"plan": notes}
