"""Scenario as text: a dialog with the YAML of the scenario, which also reads files of frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import state
from app.fitting import document_text
from app.page import escaped, show_problems
from app.uploads import CONFIG_SUFFIXES, as_scenario, checked_scenario_data
from simplan.errors import SpecError
from simplan.io import MAX_YAML_BYTES

_EDITING = "form editing"
_EDITOR_PX = 560


def show_editor_button() -> None:
    """Button that opens the dialog, and the dialog while it is open."""
    st.button("Edit as YAML", icon=":material/edit_note:", key="form edit", width="stretch", on_click=_open_editor)
    if st.session_state.get(_EDITING):  # a rerun of the page keeps the editor open
        _edit()


def take(read: Callable[[], dict[str, Any]]) -> None:
    """Stores a scenario, or shows its problems."""
    try:
        document = read()
    except SpecError as error:
        show_problems(error, lines=True)
        return
    _close_editor()
    state.set_document(document)
    st.rerun()


def _open_editor() -> None:
    st.session_state[_EDITING] = True


def _close_editor() -> None:
    st.session_state.pop(_EDITING, None)


@st.dialog("Scenario as YAML", width="large", on_dismiss=_close_editor)
def _edit() -> None:
    """Editor of the full scenario, with the errors of the text and of its values by line."""
    st.caption("Full scenario, including keys that the form does not show.")
    limit = MAX_YAML_BYTES // 2**20
    file = st.file_uploader(
        "Scenario file, launch script or configuration of a framework",
        type=CONFIG_SUFFIXES,
        key="form file",
        max_upload_size=limit,
    )
    text = document_text(state.document())
    if file is not None:
        try:
            text, notes = as_scenario(file.name, file.getvalue(), state.document())
        except SpecError as error:
            show_problems(error)
        else:
            for note in notes:
                st.caption(escaped(note))
    if st.session_state.get("form shown") != text or "form text" not in st.session_state:
        st.session_state["form shown"] = st.session_state["form text"] = text
    st.text_area("YAML", key="form text", height=_EDITOR_PX, label_visibility="collapsed")
    place = st.container()
    if st.button("Apply", key="form apply", width="stretch", type="primary"):
        with place:
            take(lambda: checked_scenario_data("scenario", st.session_state["form text"].encode()))
