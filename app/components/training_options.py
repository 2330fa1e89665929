"""Options of the training in the scenario form: adapters, options of the framework, oversubscription of the network."""

from __future__ import annotations

from typing import Any, get_args

import streamlit as st

from app import state
from app.choosing import with_adapters, without_defaults
from app.components.scenario_boxes import mend, open_choice
from app.fields import about, get, number, quantity, switch
from app.fitting import Document, objection, with_value
from app.page import escaped
from simplan import catalog
from simplan.cluster.topology import TOPOLOGIES
from simplan.model.base_weights import BaseWeights
from simplan.software.software import SoftwareSpec
from simplan.training import PREFERENCE_TASKS
from simplan.wording import either

_OPTIONS = {
    "autocast": "Autocast",
    "compiled": "torch.compile",
    "compiled_loss": "Compiled loss",
    "cuda_graphs": "CUDA graphs",
    "dtensor": "DTensor",
    "loss": "Loss",
    "tp_overlap": "Tensor-parallel overlap",
    "grad_overlap": "Gradient overlap",
    "overlap_param_gather": "Parameter-gather overlap",
    "gradient_as_bucket_view": "Gradients as bucket views",
    "loading": "Loading",
    "zero_grad_set_to_none": "Free gradients",
    "broadcast_buffers": "Broadcast buffers",
    "channels_last": "Channels last",
    "flat_parameters": "Flat parameters (FSDP1)",
    "flat_shards": "Flat shards (FSDP1)",
    "expert_dispatch": "Expert dispatch",
    "expert_overlap": "Expert overlap",
    "fused_experts": "Fused experts",
    "fp8_activation_input": "FP8 inputs of activations",
    "fp8_dot_product_attention": "FP8 attention",
    "vocab_multiple": "Vocabulary multiple",
}
_FOR_ALL = ("compiled", "loss")
"""Options that are shown under every framework."""
_EXAMPLE_RANK = 16


def show_training_options(document: Document) -> None:
    """Adapters, options of the framework, and oversubscription of the network.

    Args:
        document: Scenario in which values are tried: that of the session, or the same without its plan.
    """
    path = ("model", "lora_rank")
    rank = get(path)
    why_not = "" if rank else objection(document, with_adapters(document, _EXAMPLE_RANK))
    about_rank = about(path, why_not)
    number("LoRA rank", path, None, change=with_adapters, then=mend, disabled=bool(why_not), help=about_rank)
    _base_weights(document)
    _task(document, has_adapters=bool(rank))
    name = profile_name()
    if name in catalog.names("software"):
        profile = catalog.software(name)
        for option in dict.fromkeys((*_FOR_ALL, *profile.options)):
            _option(document, option, getattr(profile, option))
        _attention(profile)
    _oversubscription()


def _base_weights(document: Document) -> None:
    """Format of frozen weights below adapters; a mapping with more than a format stays as it is written."""
    path = ("training", "base_weights")
    written = get(path)
    values = (None, *get_args(BaseWeights.model_fields["format"].annotation))
    if written is None or isinstance(written, str):
        open_choice(document, "Base weights", path, values, None, "16 bits", then=mend)


def _task(document: Document, *, has_adapters: bool) -> None:
    """Purpose of the training; a task of preference training brings the defaults of its reference model."""
    path, usual = ("training", "task"), "lora" if has_adapters else "pretrain"
    others = ("lora",) if has_adapters else ("pretrain", "sft")
    open_choice(document, "Task", path, (*others, *PREFERENCE_TASKS), usual, then=_after_option)


def _option(document: Document, option: str, default: Any) -> None:
    """Widget of an option of the framework; disabled, with the reason, if it can have no other value."""
    path, values = ("software", option), get_args(SoftwareSpec.model_fields[option].annotation)
    if bool in values:  # or None: what another option says
        open_choice(
            document, _OPTIONS[option], path, (default, True, False), default, "as the blocks", then=_after_option
        )
    elif isinstance(default, bool):
        value = get(path, default)
        why_not = objection(document, with_value(document, path, not value))
        switch(_OPTIONS[option], path, default, then=_after_option, disabled=bool(why_not), help=about(path, why_not))
    elif values:
        open_choice(document, _OPTIONS[option], path, values, default, then=_after_option)
    else:
        number(_OPTIONS[option], path, default, then=_after_option)


def _after_option() -> None:
    state.set_document(without_defaults(state.document()))
    mend()


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
    keys = topology if isinstance(topology, dict) else {}
    if catalog.is_name("topologies", str(keys.get("preset"))):
        keys = catalog.topology_fields(keys["preset"]) | keys
    spec = TOPOLOGIES.get(str(keys.get("kind")))
    if spec is not None and path[-1] in spec.model_fields:
        field = spec.model_fields[path[-1]]
        help_text = about(path, description=field.description or "")
        quantity("Oversubscription", path, keys.get(path[-1], field.default), then=_after_option, help=help_text)
        return
    having = either([kind for kind, kind_spec in TOPOLOGIES.items() if path[-1] in kind_spec.model_fields])
    why_not = f"`{'.'.join(path)}`: needs a topology of kind {having}; the page Network has a list"
    st.number_input("Oversubscription", value=None, key="form oversubscription", disabled=True, help=escaped(why_not))


def profile_name() -> str:
    """Name of the framework's profile in the scenario."""
    software = get(("software",), "torch")
    return str(software.get("preset", "torch") if isinstance(software, dict) else software)
