"""First box of the page Plan: a launch script, a config.json, a log or the name of a model, pasted or dropped."""

from __future__ import annotations

import json

import streamlit as st

from app import state
from app.components.elements import details
from app.page import bullets, show_problems
from app.result_cache import awaited
from app.uploads import MAX_BYTES, Recognized, recognized_for
from simplan.errors import SpecError
from simplan.interop.formats import changed_settings
from simplan.job import Job
from simplan.report.search import change_words

_LABEL = "Paste a launch script, a config.json, a log, or the name of a model"
_KEY, _TEXT, _FILE = "paste", "paste text", "paste file"
_READ, _LOG = "pasted", "pasted log"
_HEIGHT_PX = 160


def show_paste() -> None:
    """The box, one line until it is opened; what is read replaces the scenario, and a log opens the page Validate."""
    with details(_LABEL, _KEY) as is_open:
        if is_open:
            _show_box()
    found = last_read()
    if found is not None:
        _show_read(found)


def _show_box() -> None:
    left, right = st.columns([3, 2], gap="medium")
    with left:
        example = "meta-llama/Llama-3.1-8B, or: torchrun ... pretrain_gpt.py --num-layers 32 ..."
        text = st.text_area(
            "Text", key=_TEXT, height=_HEIGHT_PX, placeholder=example, label_visibility="collapsed"
        ).strip()
    with right:
        file = st.file_uploader(
            "Or a file of these", key=_FILE, label_visibility="collapsed", max_upload_size=MAX_BYTES // 2**20
        )
        st.caption(
            "Read as data, never run, and not stored. What it does not say stays as in the sidebar. A log goes to the "
            "page Validate, where it is compared with the current scenario."
        )
    if not st.button("Read", type="primary", icon=":material/content_paste:", key="paste read"):
        return
    if file is None and not text:
        st.warning("Paste a text or drop a file first.")
        return
    name, content = ("", text.encode()) if file is None else (file.name, file.getvalue())
    try:
        found = awaited("reading", recognized_for, name, content, json.dumps(state.document(), default=str))
    except SpecError as error:
        show_problems(error, named=True)
        return
    st.session_state.pop(f"details {_KEY}", None)  # it closes
    if found.document is None:
        st.session_state[_LOG] = found, content
        state.set_view("held", "measured")
        state.set_view("prediction", None)
        st.switch_page("views/validate.py")
    st.session_state[_READ] = found
    state.set_document(found.document)
    if "plan" in found.document:
        st.rerun()
    st.switch_page("views/search.py")


def last_read() -> Recognized | None:
    """Content that was read last, while the scenario is that job, with any plan; None otherwise."""
    found: Recognized | None = st.session_state.get(_READ)
    if found is None or found.document is None:
        return None
    now, then = ({key: one.get(key) for key in one if key != "plan"} for one in (state.current(), found.document))
    return found if now == then else None


def _show_read(found: Recognized) -> None:
    """Kind of the content that was read, and the notes of its reader."""
    title = f"Read: {found.title}"
    with details(f"{title} ({len(found.notes)} notes)" if found.notes else title, "paste notes") as is_open:
        if is_open:
            st.markdown(bullets(found.notes) or "It says all that a prediction needs.")
            st.button("Forget it", key="paste forget", on_click=_forget)


def _forget() -> None:
    st.session_state.pop(_READ, None)


def read_log() -> tuple[Recognized, bytes] | None:
    """The log that was read last, and its content; None without one."""
    found: tuple[Recognized, bytes] | None = st.session_state.get(_LOG)
    return found


def forget_log() -> None:
    """Forgets the log that was read."""
    st.session_state.pop(_LOG, None)


def framework_words(before: Job, after: Job) -> str:
    """Difference of two jobs as settings of the framework whose file was read; empty without such a file."""
    found = last_read()
    if found is None or found.configuration is None:
        return ""
    return "; ".join(change_words(each) for each in changed_settings(found.configuration, before, after))
