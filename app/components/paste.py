"""First box of the page Plan: a launch script, a config.json, a log or the name of a model, pasted or dropped."""

from __future__ import annotations

import json

import streamlit as st

from app import state
from app.choosing import with_size
from app.components.elements import details
from app.components.scenario_boxes import mend
from app.fitting import num_data_parallel, section
from app.last_read import accept_devices, forget, last_read, remember
from app.page import bullets, show_problems
from app.result_cache import awaited
from app.uploads import MAX_BYTES, Recognized, recognized_for
from simplan.errors import SpecError
from simplan.units import counted

_LABEL = "Paste a launch script, a config.json, a log, or the name of a model"
_KEY, _TEXT, _FILE, _DEVICES = "paste", "paste text", "paste file", "paste devices"
_LOG = "pasted log"
_HEIGHT_PX = 160


def show_paste() -> None:
    """The box, one line until it is opened; what is read replaces the scenario, and a log opens the page Validate."""
    with details(_LABEL, _KEY) as is_open:
        if is_open:
            _show_box()
    recognized = last_read()
    if recognized is not None:
        _show_read(recognized)


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
        recognized = awaited("reading", recognized_for, name, content, json.dumps(state.document(), default=str))
    except SpecError as error:
        show_problems(error, named=True)
        return
    st.session_state.pop(f"details {_KEY}", None)  # it closes
    if recognized.document is None:
        st.session_state[_LOG] = recognized, content
        state.set_view("held", "measured")
        state.set_view("prediction", None)
        st.switch_page("views/validate.py")
    remember(recognized)
    state.set_document(recognized.document)
    if "plan" in recognized.document:
        st.rerun()
    st.switch_page("views/search.py")


def _show_read(recognized: Recognized) -> None:
    """Kind of the content that was read, and the notes of its reader."""
    if recognized.assumed_devices is not None:
        _show_question(recognized)
    title = f"Read: {recognized.title}"
    with details(f"{title} ({len(recognized.notes)} notes)" if recognized.notes else title, "paste notes") as is_open:
        if is_open:
            st.markdown(bullets(recognized.notes) or "It says all that a prediction needs.")
            st.button("Forget it", key="paste forget", on_click=forget)


def _show_question(recognized: Recognized) -> None:
    """The number of devices that a file does not say, to confirm or to change."""
    document = state.current()
    devices = recognized.assumed_devices
    batch, ranks = section(document, "training").get("global_batch_size"), num_data_parallel(document)
    words = f"**How many devices?** The file does not say. {devices} are assumed, from the scenario in the sidebar."
    if recognized.batch_follows_devices and isinstance(batch, int) and ranks:
        batch_of_rank = counted(batch // ranks, "sequence")
        words += f" The global batch follows: {batch_of_rank} of each data-parallel rank, {batch} in all."
    st.warning(words, icon=":material/help:")
    st.session_state[_DEVICES] = devices
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.number_input("Devices of this job", step=1, value=None, key=_DEVICES, on_change=_take_devices, width=160)
        st.button(f"Keep {devices}", key="paste keep devices", on_click=accept_devices)


def _take_devices() -> None:
    number = st.session_state[_DEVICES]
    if number is not None:
        state.set_document(with_size(state.document(), number, "num_devices"))
        mend()


def read_log() -> tuple[Recognized, bytes] | None:
    """The log that was read last, and its content; None without one."""
    kept: tuple[Recognized, bytes] | None = st.session_state.get(_LOG)
    return kept


def forget_log() -> None:
    """Forgets the log that was read."""
    st.session_state.pop(_LOG, None)
