"""Scenario form in the sidebar of pages: model, cluster, training and plan, or the scenario as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import streamlit as st

from app import state
from app.fields import choice, get, number, put, switch
from app.page import show_problems
from app.uploads import config_fields, scenario_data
from simplan import catalog
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import SpecError
from simplan.plan.plan import Recompute
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.training import Precision, TrainingSpec
from simplan.wording import divisors

_OPTIMIZERS = get_args(TrainingSpec.model_fields["optimizer"].annotation)
_SHARDING = {
    0: "none (DDP)",
    1: "ZeRO-1: optimizer states",
    2: "ZeRO-2: and gradients",
    3: "ZeRO-3: and parameters (FSDP)",
}
_OWN = "own"


def show_scenario_form(*, plan: bool = True) -> None:
    """The form, bound to the scenario of the session; with or without the plan."""
    with st.sidebar:
        _model()
        _cluster()
        _training()
        if plan:
            _plan()
        _as_text()


def _model() -> None:
    st.markdown("###### Model")
    inline = "preset" not in _section("model")
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
    number("Sequence length", ("model", "seq_len"), _preset_length(), most=10**8, help="Tokens of one sequence")
    with st.popover("Hugging Face config.json", width="stretch"):
        st.caption("Read as data and not stored; its shapes become the model of the scenario.")
        file = st.file_uploader("config.json", type=["json"], key="form config", label_visibility="collapsed")
        about = "Sequence length of the training; a config has the maximum of the model"
        length = st.number_input("Training tokens", 1, 10**8, 4096, help=about)
        if file is not None and st.button("Use", key="form use config"):
            _take(lambda: state.document() | {"model": config_fields(file.name, file.getvalue(), length)})


def _take_preset(key: str) -> None:
    name = st.session_state[key]
    if name != _OWN:
        document = state.document()
        document["model"] = {"preset": name}
        state.set_document(document)


def _preset_length() -> int | None:
    """Default sequence length of the preset; None without one."""
    preset = get(("model", "preset"))
    if not isinstance(preset, str) or preset not in catalog.names("models"):
        return None
    return catalog.model(preset).seq_len or None


def _cluster() -> None:
    st.markdown("###### Cluster")
    left, right = st.columns([3, 2])
    with left:
        if "preset" in _section("cluster"):
            choice("Nodes", ("cluster", "preset"), catalog.names("clusters"), "dgx-h100", then=_fit)
        else:
            st.text_input("Nodes", "see YAML", disabled=True)
    with right:
        number("Devices", ("cluster", "num_devices"), _devices(), most=10**6, then=_after_devices)
    if get(("cluster", "preset")) == THIS_MACHINE:
        st.caption("Processes on local cores, with costs measured by `simplan calibrate`.")


def _devices() -> int | None:
    """Number of devices; None if the scenario has none."""
    section = _section("cluster")
    if isinstance(section.get("num_devices"), int):
        return int(section["num_devices"])
    nodes, preset = section.get("num_nodes", 1), section.get("preset")
    if isinstance(nodes, int) and isinstance(preset, str) and preset in catalog.names("clusters"):
        return nodes * catalog.cluster(preset).devices_per_node
    return None


def _after_devices() -> None:
    put(("cluster", "num_nodes"), None)
    _fit()


def _training() -> None:
    st.markdown("###### Training")
    left, right = st.columns(2)
    with left:
        number("Global batch", ("training", "global_batch_size"), None, most=10**7, help="Sequences per optimizer step")
        choice("Optimizer", ("training", "optimizer"), _OPTIMIZERS, "adamw")
    with right:
        choice("Precision", ("training", "precision"), get_args(Precision), "bf16", help="Matmuls of linear layers")
        choice("Framework", ("software",), catalog.names("software"), "torch", help="Kernels, fusions and overlap")


def _plan() -> None:
    st.markdown("###### Plan")
    left, right = st.columns(2)
    with left:
        _degree("Tensor parallel", "tp", "ranks that split layers")
        _degree("Context parallel", "cp", "ranks that split sequences")
    with right:
        _degree("Pipeline", "pp", "ranks with different layers")
        number("Microbatch", ("plan", "microbatch_size"), 1, most=10**6, help="Sequences per data-parallel rank")
    choice(
        "Sharding",
        ("plan", "zero_stage"),
        tuple(_SHARDING),
        _zero_stage(),
        then=_fit,
        format_func=lambda stage: _SHARDING.get(stage, str(stage)),
    )
    dp_replicate, dp_shard = get(("plan", "dp_replicate"), 1), get(("plan", "dp_shard"), 1)
    st.caption(f"Data parallel, from the other degrees: dp_replicate {dp_replicate}, dp_shard {dp_shard}")
    if _is_above_one(get(("plan", "pp"))):
        choice("Schedule", ("plan", "schedule"), tuple(SCHEDULE_FACTS), "1f1b", then=_after_schedule)
        if _has_free_stages(get(("plan", "schedule"), "1f1b")):
            number("Stages per rank", ("plan", "virtual_stages"), 2, least=2, most=1000)
    choice("Recompute", ("plan", "recompute"), get_args(Recompute), "none", help="Modules recomputed in backward")
    with st.expander("More options"):
        number("Shard replicas", ("plan", "dp_replicate"), 1, most=10**6, then=_fit, help="dp_replicate (HSDP)")
        number("Expert parallel", ("plan", "ep"), 1, most=10**6, help="ep: ranks with different experts")
        number("Expert tensor parallel", ("plan", "etp"), 1, most=10**6, help="etp: ranks that split every expert")
        switch("Sequence parallelism", ("plan", "sequence_parallel"), _is_above_one(get(("plan", "tp"))))
        switch("Reshard after forward", ("plan", "reshard_after_forward"), default=True)
        about = "Unsharded gradients use memory until they are reduced"
        choice("Gradient reduction", ("plan", "grad_sync"), ("step", "microbatch"), _grad_sync(), help=about)
        switch("Offload optimizer", ("plan", "offload_optimizer"), default=False)
        switch("Offload activations", ("plan", "offload_activations"), default=False)


def _degree(label: str, name: str, about: str) -> None:
    """Slider of a degree of parallelism, over the divisors of the number of devices."""
    devices = _devices()
    sizes = tuple(divisors(devices)) if devices is not None and 0 < devices <= 10**6 else (1,)
    choice(label, ("plan", name), sizes, 1, slider=True, then=_fit, help=f"{name}: {about}")


def _zero_stage() -> int:
    return 3 if _is_above_one(get(("plan", "dp_shard"))) else 0


def _grad_sync() -> str:
    """The default of ``ParallelPlan.grad_sync``."""
    shards = any(_is_above_one(get(("plan", key))) for key in ("dp_shard", "cp"))
    stage = get(("plan", "zero_stage"), _zero_stage())
    return "microbatch" if shards and stage in (2, 3) and not _is_above_one(get(("plan", "pp"))) else "step"


def _fit() -> None:
    """Sets data parallelism to the number of devices over the tensor-, context- and pipeline-parallel degrees."""
    devices = _devices()
    axes = [get(("plan", key), 1) for key in ("tp", "cp", "pp")]
    stage, replicas = get(("plan", "zero_stage"), _zero_stage()), get(("plan", "dp_replicate"), 1)
    if devices is None or not all(_is_count(value) for value in (*axes, replicas)):
        return
    used = axes[0] * axes[1] * axes[2]
    if devices % used == 0:
        rest = devices // used
        sharded = stage in (1, 2, 3)
        if not sharded:
            replicas = rest
        elif rest % replicas or replicas == rest:  # no replicas requested, or their number no longer divides
            replicas = 1
        put(("plan", "dp_replicate"), replicas if replicas > 1 else None)
        put(("plan", "dp_shard"), rest // replicas if sharded else None)
        put(("plan", "zero_stage"), stage)
    if axes[2] == 1:
        put(("plan", "schedule"), None)
        put(("plan", "virtual_stages"), None)
    else:
        put(("plan", "grad_sync"), None)  # torch's pipelines reduce once per step
    if axes[0] == 1:
        put(("plan", "sequence_parallel"), None)


def _after_schedule() -> None:
    put(("plan", "virtual_stages"), 2 if _has_free_stages(get(("plan", "schedule"))) else None)


def _has_free_stages(schedule: Any) -> bool:
    """True for schedules whose number of stages per rank is an option."""
    facts = SCHEDULE_FACTS.get(str(schedule))
    return facts is not None and facts.virtual_stages is None


def _section(name: str) -> dict[str, Any]:
    """A section of the scenario; empty if the section is missing or no mapping."""
    section = get((name,))
    return section if isinstance(section, dict) else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_above_one(value: Any) -> bool:
    return _is_count(value) and value > 1


def _as_text() -> None:
    with st.expander("Scenario as YAML"):
        st.caption("Full scenario, including keys that the form does not show.")
        file = st.file_uploader("Scenario file", type=["yaml", "yml"], key="form file")
        if file is not None and st.button("Open", key="form open"):
            _take(lambda: scenario_data(file.name, file.getvalue()))
        text = state.document_text(state.document())
        if st.session_state.get("form shown") != text:
            st.session_state["form shown"] = st.session_state["form text"] = text
        st.text_area("YAML", key="form text", height=260, label_visibility="collapsed")
        if st.button("Apply", key="form apply", width="stretch"):
            _take(lambda: scenario_data("scenario", st.session_state["form text"].encode()))


def _take(read: Callable[[], dict[str, Any]]) -> None:
    """Stores a scenario unchecked; pages report its problems when they predict it."""
    try:
        document = read()
    except SpecError as error:
        show_problems(error)
        return
    state.set_document(document)
    st.rerun()
