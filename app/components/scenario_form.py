"""Scenario form in the sidebar of pages: model, cluster, training and plan, or the scenario as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import streamlit as st

from app import state
from app.components.elements import details
from app.components.verdict import show_budget
from app.fields import choice, get, number, put, switch
from app.fitting import (
    degrees_of,
    document_text,
    fitted,
    has_free_stages,
    is_above_one,
    mended,
    microbatch_sizes,
    num_devices,
    plan_value,
    section,
    valid_values,
    zero_stage,
)
from app.page import escaped, show_problems
from app.uploads import CONFIG_SUFFIXES, MAX_CONFIG_BYTES, as_scenario, checked_scenario_data, config_fields
from simplan import catalog
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import SpecError
from simplan.io import MAX_YAML_BYTES
from simplan.plan.plan import Recompute
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.training import Precision, TrainingSpec

_OPTIMIZERS = get_args(TrainingSpec.model_fields["optimizer"].annotation)
_SHARDING = {
    0: "none (DDP)",
    1: "ZeRO-1: optimizer states",
    2: "ZeRO-2: and gradients",
    3: "ZeRO-3: and parameters (FSDP)",
}
_MORE_DEGREES = (
    ("Shard replicas", "dp_replicate", "copies of the shards (HSDP)"),
    ("Expert parallel", "ep", "ranks with different experts"),
    ("Expert tensor parallel", "etp", "ranks that split every expert"),
)
_PLACEMENTS = ("tp, cp, dp, pp", "tp, cp, pp, dp", "cp, dp, tp, pp", "dp, pp, tp, cp", "pp, dp, tp, cp")
_MAX_STAGES = 64
_OWN = "own"
_NOTES, _EDITING = "form notes", "form editing"
_EDITOR_PX = 560


def show_scenario_form(*, plan: bool = True, budget: bool = False) -> None:
    """The form, bound to the scenario of the session; with or without plan and budget.

    Pages show it before they check the scenario, so that every field is there to be corrected.
    """
    with st.sidebar:
        _model()
        _cluster()
        _training()
        if plan:
            _plan()
        _as_text()
    if budget:
        show_budget()


def _model() -> None:
    st.markdown("###### Model")
    inline = "preset" not in section(state.current(), "model")
    name = get(("model", "name"), "own model") if inline else None
    options = [*([_OWN] if inline else []), *catalog.names("models")]
    key = "form model"
    st.session_state[key] = _OWN if inline else get(("model", "preset"))
    if st.session_state[key] not in options:
        st.session_state[key] = options[0]
    st.selectbox(
        "Model",
        options,
        key=key,
        on_change=_take_preset,
        args=(key,),
        format_func=lambda option: str(name) if option == _OWN else option,
        label_visibility="collapsed",
        help="Catalog name; or upload a Hugging Face config.json below",
    )
    left, right = st.columns(2)
    with left:
        number("Sequence", ("model", "seq_len"), _of_preset("seq_len"), help="Tokens of one sequence", then=_mend)
    with right:
        about = "Entries of the embedding; a tensor-parallel degree that does not divide them pads them"
        number("Vocabulary", ("model", "vocab_size"), _of_preset("vocab_size"), help=about, then=_fit)
    with st.popover("Hugging Face config.json", width="stretch"):
        st.caption("Read as data and not stored; its shapes become the model of the scenario.")
        limit = MAX_CONFIG_BYTES // 2**20
        file = st.file_uploader(
            "config.json", type=["json"], key="form config", label_visibility="collapsed", max_upload_size=limit
        )
        about = "Sequence length of the training; a config has the maximum of the model"
        length = st.number_input("Sequence length", 1, 10**8, 4096, help=about)
        if file is not None and st.button("Use", key="form use config"):
            _take(lambda: state.document() | {"model": config_fields(file.name, file.getvalue(), length)})


def _take_preset(key: str) -> None:
    name = st.session_state[key]
    if name != _OWN:
        document = state.document()
        document["model"] = {"preset": name}
        state.set_document(document)
        _mend()


def _of_preset(field: str) -> int | None:
    """Value of the preset; None without one."""
    preset = get(("model", "preset"))
    if not isinstance(preset, str) or preset not in catalog.names("models"):
        return None
    return getattr(catalog.model(preset), field) or None


def _cluster() -> None:
    st.markdown("###### Cluster")
    left, right = st.columns([3, 2])
    with left:
        if "preset" in section(state.current(), "cluster"):
            choice("Nodes", ("cluster", "preset"), catalog.names("clusters"), "dgx-h100", then=_mend)
        else:
            st.text_input("Nodes", "see YAML", disabled=True)
    with right:
        number("Devices", ("cluster", "num_devices"), num_devices(state.current()), then=_after_devices)
    if get(("cluster", "preset")) == THIS_MACHINE:
        st.caption("Processes on local cores, with costs measured by `simplan calibrate`.")


def _after_devices() -> None:
    put(("cluster", "num_nodes"), None)
    _mend()


def _training() -> None:
    st.markdown("###### Training")
    left, right = st.columns(2)
    with left:
        number("Global batch", ("training", "global_batch_size"), None, help="Sequences per optimizer step", then=_mend)
        choice("Optimizer", ("training", "optimizer"), _OPTIMIZERS, "adamw")
    with right:
        choice("Precision", ("training", "precision"), get_args(Precision), "bf16", help="Matmuls of linear layers")
        names = catalog.names("software")
        path = ("software", "preset") if isinstance(get(("software",)), dict) else ("software",)  # with options
        choice("Framework", path, names, "torch", help="Kernels, fusions and overlap", then=_mend)


def _plan() -> None:
    st.markdown("###### Plan")
    for note in st.session_state.pop(_NOTES, ()):
        st.caption(f":material/info: {escaped(note)}")
    document = state.current()
    left, right = st.columns(2)
    with left:
        _degree("Tensor parallel", "tp", "ranks that split layers")
        _degree("Context parallel", "cp", "ranks that split sequences")
    with right:
        _degree("Pipeline", "pp", "ranks with different layers")
        if isinstance(get(("plan", "microbatch_sizes")), list):
            st.text_input("Microbatch", "see YAML", disabled=True)
        else:
            sizes, about = microbatch_sizes(document), "Sequences per data-parallel rank"
            choice("Microbatch", ("plan", "microbatch_size"), sizes, 1, slider=True, then=_fit, help=about)
    _valid_choice("Sharding", "zero_stage", tuple(_SHARDING), zero_stage(document), _SHARDING.get)
    dp_replicate, dp_shard = get(("plan", "dp_replicate"), 1), get(("plan", "dp_shard"), 1)
    st.caption(f"Data parallel, from the other degrees: dp_replicate {dp_replicate}, dp_shard {dp_shard}")
    if is_above_one(get(("plan", "pp"))):
        schedule = plan_value(document, "schedule") or "1f1b"
        _valid_choice("Schedule", "schedule", tuple(SCHEDULE_FACTS), schedule, then=_after_schedule)
        if has_free_stages(get(("plan", "schedule"), schedule)):
            stages = valid_values(document, "virtual_stages", range(2, _MAX_STAGES + 1))
            choice("Stages per rank", ("plan", "virtual_stages"), stages, plan_value(document, "virtual_stages") or 2)
    about = "Modules recomputed in backward"
    _valid_choice("Recompute", "recompute", get_args(Recompute), "none", about=about)
    with details("More options", "options") as is_open:
        if is_open:
            _more_options(document)


def _more_options(document: dict[str, Any]) -> None:
    for label, name, words in _MORE_DEGREES:
        choice(label, ("plan", name), degrees_of(document, name), 1, then=_fit, help=f"{name}: {words}")
    _valid_switch("Sequence parallelism", "sequence_parallel")
    _valid_switch("Reshard after forward", "reshard_after_forward")
    about = "Unsharded gradients use memory until they are reduced"
    syncs = ("step", "microbatch")
    _valid_choice("Gradient reduction", "grad_sync", syncs, plan_value(document, "grad_sync"), about=about)
    _placement()
    _valid_switch("Offload optimizer", "offload_optimizer")
    _valid_switch("Offload activations", "offload_activations")


def _placement() -> None:
    """Order of the axes from inside of nodes outwards; a list of devices is shown in the YAML only."""
    if isinstance(get(("plan", "placement")), list):
        st.text_input("Placement", "see YAML", disabled=True)
        return
    about = "placement: axes from inside of nodes outwards; the first ones have the fast links"
    _valid_choice("Placement", "placement", _PLACEMENTS, _PLACEMENTS[0], about=about)


def _degree(label: str, name: str, about: str) -> None:
    """Slider of a degree of parallelism, over the values that devices, model and the other degrees allow."""
    sizes = degrees_of(state.current(), name)
    choice(label, ("plan", name), sizes, 1, slider=True, then=_fit, help=f"{name}: {about}")


def _valid_choice(
    label: str,
    name: str,
    values: Sequence[Any],
    default: Any,
    words: Callable[[Any], str | None] = str,
    *,
    about: str = "",
    then: Callable[[], None] | None = None,
) -> None:
    """Select box of a plan key, with the values that the other settings allow; the help names the others."""
    valid = valid_values(state.current(), name, values)
    others = [str(words(value)) for value in values if value not in valid]
    hidden = f"Other settings rule out: {', '.join(others)}" if others else ""
    choice(
        label,
        ("plan", name),
        valid,
        default,
        then=then or _fit,
        format_func=lambda value: str(words(value) or value),
        help=". ".join(filter(None, (about, hidden))) or None,
    )


def _valid_switch(label: str, name: str) -> None:
    """Switch of a plan key; disabled if the other settings rule its other value out."""
    value = plan_value(state.current(), name) is True
    switch(label, ("plan", name), value, disabled=len(valid_values(state.current(), name, (value, not value))) < 2)


def _fit() -> None:
    """Fits data parallelism to the devices."""
    state.set_document(fitted(state.document()))


def _mend() -> None:
    """Replaces values of the plan that other sections no longer allow; the form tells which."""
    document, st.session_state[_NOTES] = mended(state.document())
    state.set_document(document)


def _after_schedule() -> None:
    put(("plan", "virtual_stages"), 2 if has_free_stages(get(("plan", "schedule"))) else None)


def _as_text() -> None:
    st.button("Edit as YAML", icon=":material/edit_note:", key="form edit", width="stretch", on_click=_open_editor)
    if st.session_state.get(_EDITING):  # a rerun of the page keeps the editor open
        _edit()


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
            _take(lambda: checked_scenario_data("scenario", st.session_state["form text"].encode()))


def _take(read: Callable[[], dict[str, Any]]) -> None:
    """Stores a scenario, or shows its problems."""
    try:
        document = read()
    except SpecError as error:
        show_problems(error, lines=True)
        return
    _close_editor()
    state.set_document(document)
    st.rerun()
