"""Names of models on the Hugging Face Hub as presets of the catalog, and models as their ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simplan.catalog.spelling import find
from simplan.errors import SpecError
from simplan.interop.huggingface import model_fields_from_config, model_types
from simplan.model.families.family import LORA
from simplan.model.model import ModelSpec


def preset_of(name: str) -> str | None:
    """Preset with the shapes of a model on the Hub; None if the catalog has none.

    >>> preset_of("meta-llama/Llama-3.1-8B-Instruct"), preset_of("TheBloke/Llama-2-7B-GPTQ"), preset_of("someone/model")
    ('llama3.1-8b', 'llama2-7b', None)
    """
    short = _BITS.sub("", name.rstrip("/").rpartition("/")[2])
    return find("models", f"hub/{short}").name or None


_BITS = re.compile(r"(?i)(?:[-_.](?:gptq|awq|aqlm|int4|bnb|nf4|bf16|4bit|2bit|1x16|unsloth))+$")
"""End of the name of a checkpoint of few bits, whose model has the shapes of the one without it."""


def config_of(model: ModelSpec) -> dict[str, Any] | None:
    """``config.json`` of a model, from which ``model_fields_from_config`` gives the same model; None if there is none.

    Length of sequences and adapters are no part of it.
    """
    for name, kind in model_types().items():
        if kind.family != model.family:
            continue
        values = {field: getattr(model, field) for field in kind.keys}
        for field in kind.in_experts & values.keys():
            values[field] //= max(1, model.moe_intermediate_size)
        config: dict[str, Any] = {"model_type": name}
        for field, value in values.items():
            if field == "num_classes":
                value = {str(label): f"LABEL_{label}" for label in range(value)}
            if value is not None:
                _put(config, kind.keys[field], value)
        config |= {key: values[0] for key, values in kind.neutral.items() if values and key in _WRITTEN}
        if kind.later_tokens is not None:
            config[kind.later_tokens] = model.mtp_num_layers
        if _same_model(config, model):
            return config
    return None


_WRITTEN = ("hidden_act", "activation_function", "mlp_bias", "clip_qkv")
"""Keys whose values are written although the defaults of transformers are the same."""


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[last] = value


def _same_model(config: Mapping[str, Any], model: ModelSpec) -> bool:
    try:
        fields = model_fields_from_config(
            config, name=model.name, seq_len=model.seq_len, mtp=bool(model.mtp_num_layers)
        )
        read = ModelSpec.model_validate(fields)
    except (SpecError, ValueError):
        return False
    others = ("sources", "document_lengths", "packs", "objective", *LORA)
    changed = {field: getattr(model, field) for field in others}
    return read.model_copy(update=changed) == model
