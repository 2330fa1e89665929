"""Scenario form in the sidebar of pages: model, cluster, training and plan."""

from __future__ import annotations

from functools import partial
from typing import get_args

import streamlit as st

from app import state
from app.choosing import kind_of, open_links, with_framework, with_kind, with_link, with_model, with_size
from app.components.elements import details
from app.components.scenario_boxes import fit, mend, name_box, open_choice, show_notes, valid_choice, valid_switch
from app.components.scenario_editor import show_editor_button, take
from app.components.training_options import profile_name, show_training_options
from app.components.verdict import show_budget
from app.fields import about, choice, get, number, put
from app.fitting import (
    Document,
    cluster_size,
    degrees_of,
    has_free_stages,
    is_above_one,
    microbatch_sizes,
    plan_value,
    section,
    valid_values,
    zero_stage,
)
from app.labels import label
from app.uploads import MAX_MODEL_BYTES, own_model_fields
from simplan import catalog
from simplan.catalog import Kind
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import SpecError
from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe
from simplan.plan.plan import Recompute
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.scenario.names import with_catalog_names
from simplan.training import Precision, TrainingSpec

_OPTIMIZERS = get_args(TrainingSpec.model_fields["optimizer"].annotation)
_SHARDING = {
    0: "none (DDP)",
    1: "ZeRO-1: optimizer states",
    2: "ZeRO-2: and gradients",
    3: "ZeRO-3: and parameters (FSDP)",
}
_MORE_DEGREES = {"dp_replicate": "Shard replicas", "ep": "Expert parallel", "etp": "Expert tensor parallel"}
_PLACEMENTS = ("tp, cp, dp, pp", "tp, cp, pp, dp", "cp, dp, tp, pp", "dp, pp, tp, cp", "pp, dp, tp, cp")
_LINKS = {"intra_link": "Link in a node", "inter_link": "Network"}
_MAX_STAGES = 64
_OWN = "own"


def show_scenario_form(*, plan: bool = True, budget: bool = False) -> None:
    """The form, bound to the scenario of the session; with or without plan and budget.

    Pages show it before they check the scenario, so that every field is there to be corrected.
    """
    _use_catalog_names()
    with st.sidebar:
        _model()
        _cluster()
        _training(state.document() if plan else state.document() | {"plan": {}})
        if plan:
            _plan()
        show_editor_button()
    if budget:
        show_budget()


def _use_catalog_names() -> None:
    """Writes names of a link or a file as the catalog does, for the boxes to show."""
    try:
        document, sentences = with_catalog_names(state.document())
    except SpecError:  # which the page shows
        return
    if sentences:
        state.set_document(document)


def _model() -> None:
    st.markdown("###### Model")
    key = "form model"
    names = {name: label("models", name) for name in catalog.names("models")}
    preset = get(("model", "preset"))
    is_captured = get(("model", "captured")) is not None
    if not isinstance(preset, str):
        kind = "captured" if is_captured else "own shapes"
        names = {_OWN: f"{get(('model', 'name'), 'own model')} ({kind})"} | names
    about_name = (
        "Name in the catalog, on the Hugging Face Hub, or as people say it; or upload a model of your own below"
    )
    name_box("Model", key, preset or _OWN, names, _with_model, label_visibility="collapsed", help=about_name)
    if is_captured:
        st.caption("Captured from code, whose sizes it has.")
    else:
        _sizes()
    with st.popover("Model of your own", width="stretch"):
        st.caption(
            "A file of `simplan capture`, or a config.json of Hugging Face. Read as data and not stored; it becomes "
            "the model of the scenario."
        )
        limit = MAX_MODEL_BYTES // 2**20
        file = st.file_uploader(
            "Model", type=["json"], key="form model file", label_visibility="collapsed", max_upload_size=limit
        )
        about_length = "Sequence length of the training, for a config.json, which has the maximum of the model"
        length = st.number_input("Sequence length", 1, 10**8, 4096, help=about_length)
        if file is not None and st.button("Use", key="form use model"):
            take(lambda: state.document() | {"model": own_model_fields(file.name, file.getvalue(), length)})


def _sizes() -> None:
    """Sizes of a model that a scenario may change."""
    left, right = st.columns(2)
    with left:
        number("Sequence", ("model", "seq_len"), _of_preset("seq_len"), then=mend)
    with right:
        more = "A tensor-parallel degree that does not divide them pads them"
        path = ("model", "vocab_size")
        number("Vocabulary", path, _of_preset("vocab_size"), help=about(path, more), then=fit)


def _with_model(document: Document, name: str) -> tuple[Document, list[str]]:
    return (document if name == _OWN else with_model(document, name)), []


def _of_preset(field: str) -> int | None:
    """Value of the preset; None without one."""
    preset = get(("model", "preset"))
    if not isinstance(preset, str) or preset not in catalog.names("models"):
        return None
    return getattr(catalog.model(preset), field) or None


def _cluster() -> None:
    st.markdown("###### Cluster")
    kind, size = kind_of(state.current()), cluster_size(state.current())
    if kind:
        kinds: tuple[Kind, ...] = ("clusters", "devices")
        names = {name: label(kind_of_names, name) for kind_of_names in kinds for name in catalog.names(kind_of_names)}
        about_kind = "Nodes of the catalog, or a device: 8x A100 80GB, MI300X, 4090, 2x8 H100"
        name_box("Hardware", "form hardware", kind, names, with_kind, help=about_kind)
    else:
        st.text_input("Hardware", "see YAML", disabled=True)
    fixed = kind == THIS_MACHINE or "nodes" in section(state.current(), "cluster")
    labels = {"num_nodes": "Nodes", "devices_per_node": "Per node", "num_devices": "Devices"}
    for column, (key, words) in zip(st.columns(3, gap="xsmall"), labels.items(), strict=True):
        with column:
            disabled = fixed and key != "num_devices"
            change = partial(with_size, key=key)
            path = ("cluster", key)
            number(words, path, getattr(size, key), change=change, then=mend, disabled=disabled)
    for key in open_links(state.current()):
        _link(key)
    if kind == THIS_MACHINE:
        st.caption("Processes on local cores, with costs measured by `simplan calibrate`.")


def _link(key: str) -> None:
    """Box of a link between the devices of a node, or of the network between nodes."""
    words, path = _LINKS[key], ("cluster", key)
    link = get(path)
    if link is not None and not isinstance(link, str):
        st.text_input(words, "see YAML", disabled=True)
        return
    is_network = key == "inter_link"
    names = {name: label("links", name) for name in catalog.names("links") if name.endswith("gbit") is is_network}

    def change(document: Document, name: str) -> tuple[Document, list[str]]:
        return with_link(document, name, key), []

    name_box(words, f"form {key}", link, names, change, help=about(path), placeholder="choose one")


def _training(document: Document) -> None:
    """Training; options are those that bring no new problem to a scenario."""
    st.markdown("###### Training")
    left, right = st.columns(2)
    with left:
        number("Global batch", ("training", "global_batch_size"), None, then=mend)
        choice("Optimizer", ("training", "optimizer"), _OPTIMIZERS, "adamw")
    with right:
        choice("Precision", ("training", "precision"), get_args(Precision), "bf16", then=_after_precision)
    if get(("training", "precision")) == "fp8":
        recipes = [None, *(recipe for recipe in get_args(Fp8Recipe) if recipe != DEFAULT_RECIPE)]
        open_choice(document, "FP8 recipe", ("training", "fp8_recipe"), recipes, None, DEFAULT_RECIPE)
    names = {name: label("software", name) for name in catalog.names("software")}
    profile = profile_name()
    about_framework = "Kernels, fusions and overlap. Names that people use are found: PyTorch FSDP2, Megatron Core"
    name_box("Framework", "form framework", profile, names, with_framework, help=about_framework)
    with details("Training options", "training options") as is_open:
        if is_open:
            show_training_options(document)


def _after_precision() -> None:
    if get(("training", "precision")) != "fp8":
        put(("training", "fp8_recipe"), None)


def _plan() -> None:
    st.markdown("###### Plan")
    show_notes("plan")
    document = state.current()
    left, right = st.columns(2)
    with left:
        _degree("Tensor parallel", "tp")
        _degree("Context parallel", "cp")
    with right:
        _degree("Pipeline", "pp")
        if isinstance(get(("plan", "microbatch_sizes")), list):
            st.text_input("Microbatch", "see YAML", disabled=True)
        else:
            path, more = ("plan", "microbatch_size"), "Of each data-parallel rank"
            choice("Microbatch", path, microbatch_sizes(document), 1, slider=True, then=fit, help=about(path, more))
    valid_choice("Sharding", "zero_stage", tuple(_SHARDING), zero_stage(document), _SHARDING.get)
    dp_replicate, dp_shard = get(("plan", "dp_replicate"), 1), get(("plan", "dp_shard"), 1)
    st.caption(f"Data parallel, from the other degrees: dp_replicate {dp_replicate}, dp_shard {dp_shard}")
    if is_above_one(get(("plan", "pp"))):
        schedule = plan_value(document, "schedule") or "1f1b"
        valid_choice("Schedule", "schedule", tuple(SCHEDULE_FACTS), schedule, then=_after_schedule)
        if has_free_stages(get(("plan", "schedule"), schedule)):
            stages = valid_values(document, "virtual_stages", range(2, _MAX_STAGES + 1))
            choice("Stages per rank", ("plan", "virtual_stages"), stages, plan_value(document, "virtual_stages") or 2)
    valid_choice("Recompute", "recompute", get_args(Recompute), "none")
    with details("More options", "options") as is_open:
        if is_open:
            _more_of_plan(document)


def _more_of_plan(document: Document) -> None:
    for name, words in _MORE_DEGREES.items():
        choice(words, ("plan", name), degrees_of(document, name), 1, then=fit)
    valid_switch("Sequence parallelism", "sequence_parallel")
    valid_switch("Reshard after forward", "reshard_after_forward")
    more = "Unsharded gradients use memory until they are reduced"
    syncs = ("step", "microbatch")
    valid_choice("Gradient reduction", "grad_sync", syncs, plan_value(document, "grad_sync"), more=more)
    _placement()
    valid_switch("Offload optimizer", "offload_optimizer")
    valid_switch("Offload activations", "offload_activations")


def _placement() -> None:
    """Order of the axes from inside of nodes outwards; a list of devices is shown in the YAML only."""
    if isinstance(get(("plan", "placement")), list):
        st.text_input("Placement", "see YAML", disabled=True)
        return
    valid_choice("Placement", "placement", _PLACEMENTS, _PLACEMENTS[0], more="The first ones have the fast links")


def _degree(words: str, name: str) -> None:
    """Slider of a degree of parallelism, over the values that devices, model and the other degrees allow."""
    choice(words, ("plan", name), degrees_of(state.current(), name), 1, slider=True, then=fit)


def _after_schedule() -> None:
    put(("plan", "virtual_stages"), 2 if has_free_stages(get(("plan", "schedule"))) else None)
