"""Scenario form in the sidebar of pages: model, cluster, training and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import streamlit as st

from app import state
from app.choosing import (
    kind_of,
    open_links,
    short,
    with_adapters,
    with_framework,
    with_kind,
    with_link,
    with_model,
    with_size,
)
from app.components.elements import details
from app.components.scenario_editor import show_editor_button, take
from app.components.verdict import show_budget
from app.fields import about, choice, get, number, put, quantity, switch
from app.fitting import (
    Document,
    cluster_size,
    degrees_of,
    fitted,
    fitting_batches,
    has_free_stages,
    is_above_one,
    mended,
    microbatch_sizes,
    num_data_parallel,
    objection,
    plan_value,
    section,
    valid_values,
    with_value,
    zero_stage,
)
from app.labels import label
from app.page import escaped
from app.uploads import MAX_CONFIG_BYTES, config_fields
from simplan import catalog
from simplan.catalog import Kind
from simplan.cluster.machine import THIS_MACHINE
from simplan.cluster.topology import TOPOLOGIES
from simplan.errors import SpecError
from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe
from simplan.plan.plan import Recompute
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.scenario.names import with_catalog_names
from simplan.software.software import SoftwareSpec
from simplan.training import Precision, TrainingSpec
from simplan.wording import either

_OPTIMIZERS = get_args(TrainingSpec.model_fields["optimizer"].annotation)
_SHARDING = {
    0: "none (DDP)",
    1: "ZeRO-1: optimizer states",
    2: "ZeRO-2: and gradients",
    3: "ZeRO-3: and parameters (FSDP)",
}
_MORE_DEGREES = {"dp_replicate": "Shard replicas", "ep": "Expert parallel", "etp": "Expert tensor parallel"}
_OPTIONS = {
    "compiled": "torch.compile",
    "loss": "Loss",
    "tp_overlap": "Tensor-parallel overlap",
    "grad_overlap": "Gradient overlap",
    "overlap_param_gather": "Parameter-gather overlap",
    "gradient_as_bucket_view": "Gradients as bucket views",
    "zero_grad_set_to_none": "Free gradients",
    "channels_last": "Channels last",
    "expert_dispatch": "Expert dispatch",
    "expert_overlap": "Expert overlap",
    "fused_experts": "Fused experts",
    "fp8_dot_product_attention": "FP8 attention",
    "vocab_multiple": "Vocabulary multiple",
}
_FOR_ALL = ("compiled", "loss")
"""Options that are shown under every framework."""
_PLACEMENTS = ("tp, cp, dp, pp", "tp, cp, pp, dp", "cp, dp, tp, pp", "dp, pp, tp, cp", "pp, dp, tp, cp")
_LINKS = {"intra_link": "Link in a node", "inter_link": "Network"}
_MAX_STAGES = 64
_OWN = "own"
_EXAMPLE_RANK = 16
_NOTES = "form notes"


def show_scenario_form(*, plan: bool = True, budget: bool = False) -> None:
    """The form, bound to the scenario of the session; with or without plan and budget.

    Pages show it before they check the scenario, so that every field is there to be corrected.
    """
    _use_catalog_names()
    with st.sidebar:
        _model()
        _cluster()
        _training()
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
    if not isinstance(preset, str):
        names = {_OWN: str(get(("model", "name"), "own model"))} | names
    about_name = "Name in the catalog, on the Hugging Face Hub, or as people say it; or upload a config.json below"
    _name_box("Model", key, preset or _OWN, names, _with_model, label_visibility="collapsed", help=about_name)
    left, right = st.columns(2)
    with left:
        number("Sequence", ("model", "seq_len"), _of_preset("seq_len"), then=_mend)
    with right:
        more = "A tensor-parallel degree that does not divide them pads them"
        path = ("model", "vocab_size")
        number("Vocabulary", path, _of_preset("vocab_size"), help=about(path, more), then=_fit)
    with st.popover("Hugging Face config.json", width="stretch"):
        st.caption("Read as data and not stored; its shapes become the model of the scenario.")
        limit = MAX_CONFIG_BYTES // 2**20
        file = st.file_uploader(
            "config.json", type=["json"], key="form config", label_visibility="collapsed", max_upload_size=limit
        )
        about_length = "Sequence length of the training; a config has the maximum of the model"
        length = st.number_input("Sequence length", 1, 10**8, 4096, help=about_length)
        if file is not None and st.button("Use", key="form use config"):
            take(lambda: state.document() | {"model": config_fields(file.name, file.getvalue(), length)})


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
        names = {name: label(each, name) for each in kinds for name in catalog.names(each)}
        about_kind = "Nodes of the catalog, or a device: 8x A100 80GB, MI300X, 4090, 2x8 H100"
        _name_box("Hardware", "form hardware", kind, names, with_kind, help=about_kind)
    else:
        st.text_input("Hardware", "see YAML", disabled=True)
    fixed = kind == THIS_MACHINE or "nodes" in section(state.current(), "cluster")
    labels = {"num_nodes": "Nodes", "devices_per_node": "Per node", "num_devices": "Devices"}
    for column, (key, words) in zip(st.columns(3, gap="xsmall"), labels.items(), strict=True):
        with column:
            disabled = fixed and key != "num_devices"
            change = partial(with_size, key=key)
            path = ("cluster", key)
            number(words, path, getattr(size, key), change=change, then=_mend, disabled=disabled)
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
    names = {name: name for name in catalog.names("links") if name.endswith("gbit") is is_network}

    def change(document: Document, name: str) -> tuple[Document, list[str]]:
        return with_link(document, name, key), []

    _name_box(words, f"form {key}", link, names, change, help=about(path), placeholder="choose one")


def _training() -> None:
    st.markdown("###### Training")
    left, right = st.columns(2)
    with left:
        number("Global batch", ("training", "global_batch_size"), None, then=_mend)
        choice("Optimizer", ("training", "optimizer"), _OPTIMIZERS, "adamw")
    with right:
        choice("Precision", ("training", "precision"), get_args(Precision), "bf16", then=_after_precision)
    if get(("training", "precision")) == "fp8":
        recipes = [None, *(recipe for recipe in get_args(Fp8Recipe) if recipe != DEFAULT_RECIPE)]
        _open_choice("FP8 recipe", ("training", "fp8_recipe"), recipes, None, DEFAULT_RECIPE)
    names = {name: name for name in catalog.names("software")}
    profile = _profile_name()
    about_framework = "Kernels, fusions and overlap; also as people say it: FSDP2, Megatron-Core, Lightning"
    _name_box("Framework", "form framework", profile, names, with_framework, help=about_framework)


def _profile_name() -> str:
    software = get(("software",), "torch")
    return str(software.get("preset", "torch") if isinstance(software, dict) else software)


def _after_precision() -> None:
    if get(("training", "precision")) != "fp8":
        put(("training", "fp8_recipe"), None)


def _plan() -> None:
    st.markdown("###### Plan")
    _show_notes("plan")
    document = state.current()
    _offer_batches(document)
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
            choice("Microbatch", path, microbatch_sizes(document), 1, slider=True, then=_fit, help=about(path, more))
    _valid_choice("Sharding", "zero_stage", tuple(_SHARDING), zero_stage(document), _SHARDING.get)
    dp_replicate, dp_shard = get(("plan", "dp_replicate"), 1), get(("plan", "dp_shard"), 1)
    st.caption(f"Data parallel, from the other degrees: dp_replicate {dp_replicate}, dp_shard {dp_shard}")
    if is_above_one(get(("plan", "pp"))):
        schedule = plan_value(document, "schedule") or "1f1b"
        _valid_choice("Schedule", "schedule", tuple(SCHEDULE_FACTS), schedule, then=_after_schedule)
        if has_free_stages(get(("plan", "schedule"), schedule)):
            stages = valid_values(document, "virtual_stages", range(2, _MAX_STAGES + 1))
            choice("Stages per rank", ("plan", "virtual_stages"), stages, plan_value(document, "virtual_stages") or 2)
    _valid_choice("Recompute", "recompute", get_args(Recompute), "none")
    with details("More options", "options") as is_open:
        if is_open:
            _more_of_plan(document)
            _more_of_training(document)


def _offer_batches(document: Document) -> None:
    """Buttons of the batches next to one that the data-parallel ranks cannot share."""
    batches = fitting_batches(document)
    if not batches:
        return
    ranks, batch = num_data_parallel(document), section(document, "training").get("global_batch_size")
    st.caption(f":material/info: {ranks} data-parallel ranks cannot share a global batch of {batch}. These they can:")
    for column, size in zip(st.columns(len(batches)), batches, strict=True):
        column.button(f"Batch {size}", key=f"form batch {size}", width="stretch", on_click=_take_batch, args=(size,))


def _take_batch(size: int) -> None:
    put(("training", "global_batch_size"), size)


def _more_of_plan(document: Document) -> None:
    for name, words in _MORE_DEGREES.items():
        choice(words, ("plan", name), degrees_of(document, name), 1, then=_fit)
    _valid_switch("Sequence parallelism", "sequence_parallel")
    _valid_switch("Reshard after forward", "reshard_after_forward")
    more = "Unsharded gradients use memory until they are reduced"
    syncs = ("step", "microbatch")
    _valid_choice("Gradient reduction", "grad_sync", syncs, plan_value(document, "grad_sync"), more=more)
    _placement()
    _valid_switch("Offload optimizer", "offload_optimizer")
    _valid_switch("Offload activations", "offload_activations")


def _more_of_training(document: Document) -> None:
    """Adapters, options of the framework, and oversubscription of the network."""
    path = ("model", "lora_rank")
    rank = get(path)
    why_not = "" if rank else objection(document, with_adapters(document, _EXAMPLE_RANK))
    about_rank = about(path, why_not)
    number("LoRA rank", path, None, change=with_adapters, then=_mend, disabled=bool(why_not), help=about_rank)
    name = _profile_name()
    if name in catalog.names("software"):
        profile = catalog.software(name)
        for option in dict.fromkeys((*_FOR_ALL, *profile.options)):
            _option(document, option, getattr(profile, option))
        _attention(profile)
    _oversubscription()


def _option(document: Document, option: str, default: Any) -> None:
    """Widget of an option of the framework; disabled, with the reason, if it can have no other value."""
    path, values = ("software", option), get_args(SoftwareSpec.model_fields[option].annotation)
    if isinstance(default, bool):
        value = get(path, default)
        why_not = objection(document, with_value(document, path, not value))
        switch(_OPTIONS[option], path, default, then=_after_option, disabled=bool(why_not), help=about(path, why_not))
    elif values:
        _open_choice(_OPTIONS[option], path, values, default, then=_after_option)
    else:
        number(_OPTIONS[option], path, default, then=_after_option)


def _after_option() -> None:
    state.set_document(short(state.document()))
    _mend()


def _attention(profile: SoftwareSpec) -> None:
    """The attention kernel, which follows from the framework."""
    field = type(profile.layers).model_fields["attention"]
    kernel = profile.layers.attention
    st.session_state["form attention"] = kernel
    why_not = f"{profile.id} has {kernel} attention; no scenario chooses another"
    about_kernel = f"{escaped(why_not)}. {escaped(field.description or '')}"
    st.selectbox("Attention", [kernel], key="form attention", disabled=True, help=about_kernel)


def _oversubscription() -> None:
    """Oversubscription of the topology; disabled without a topology that has one."""
    path, topology = ("cluster", "topology", "oversubscription"), get(("cluster", "topology"))
    if isinstance(topology, str):
        topology = {"preset": topology}
    own = topology if isinstance(topology, dict) else {}
    if catalog.is_name("topologies", str(own.get("preset"))):
        own = catalog.topology_fields(own["preset"]) | own
    spec = TOPOLOGIES.get(str(own.get("kind")))
    if spec is not None and path[-1] in spec.model_fields:
        field = spec.model_fields[path[-1]]
        help_text = about(path, description=field.description or "")
        quantity("Oversubscription", path, own.get(path[-1], field.default), then=_after_option, help=help_text)
        return
    having = either([kind for kind, each in TOPOLOGIES.items() if path[-1] in each.model_fields])
    why_not = f"`{'.'.join(path)}`: needs a topology of kind {having}; the page Network has a list"
    st.number_input("Oversubscription", value=None, key="form oversubscription", disabled=True, help=escaped(why_not))


def _placement() -> None:
    """Order of the axes from inside of nodes outwards; a list of devices is shown in the YAML only."""
    if isinstance(get(("plan", "placement")), list):
        st.text_input("Placement", "see YAML", disabled=True)
        return
    _valid_choice("Placement", "placement", _PLACEMENTS, _PLACEMENTS[0], more="The first ones have the fast links")


def _degree(words: str, name: str) -> None:
    """Slider of a degree of parallelism, over the values that devices, model and the other degrees allow."""
    choice(words, ("plan", name), degrees_of(state.current(), name), 1, slider=True, then=_fit)


def _valid_choice(
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
        then=then or _fit,
        format_func=lambda value: str(words(value) or value),
        help=about(path, more, _ruled_out(words(value) for value in values if value not in valid)),
    )


def _open_choice(
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
        default_words: Words for the value None.
    """
    document = state.current()
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


def _valid_switch(label: str, name: str) -> None:
    """Switch of a plan key; disabled if the other settings rule its other value out."""
    value = plan_value(state.current(), name) is True
    switch(label, ("plan", name), value, disabled=len(valid_values(state.current(), name, (value, not value))) < 2)


def _name_box(
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
        args=(key, change),
        format_func=lambda name: names.get(name, name),
        accept_new_options=True,
        filter_mode="contains",
        **more,
    )
    _show_notes(key)


def _take_name(key: str, change: Callable[[Document, str], tuple[Document, list[str]]]) -> None:
    name = st.session_state[key]
    if name is None:
        return
    try:
        document, notes = change(state.document(), name)
    except SpecError as error:
        st.session_state[_NOTES] = {key: [problem.sentence() for problem in error.problems]}
        return
    document, of_plan = mended(document)
    state.set_document(document)
    st.session_state[_NOTES] = {key: notes, "plan": of_plan}


def _show_notes(place: str) -> None:
    """Notes on the last change: below a name's box, or above the plan."""
    for note in st.session_state.get(_NOTES, {}).pop(place, ()):
        st.caption(f":material/info: {escaped(note)}")


def _fit() -> None:
    """Fits data parallelism to the devices."""
    state.set_document(fitted(state.document()))


def _mend() -> None:
    """Replaces values of the plan that other sections no longer allow; the form tells which."""
    document, notes = mended(state.document())
    state.set_document(document)
    st.session_state[_NOTES] = {"plan": notes}


def _after_schedule() -> None:
    put(("plan", "virtual_stages"), 2 if has_free_stages(get(("plan", "schedule"))) else None)
