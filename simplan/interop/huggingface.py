"""Hugging Face's ``config.json`` as a model, for families whose layers are exactly those of GPT-2 and Llama.

Keys that change neither shapes nor costs (initializers, token ids, dropout rates, rotary scaling) are accepted. Keys
that change the model in a way simplan does not model are refused by name unless they have their neutral value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.problems import render_value

__all__ = ["MODEL_TYPES", "model_fields_from_config"]

# What each model type calls a field of ModelSpec.
_GPT2_KEYS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA_KEYS = {
    "num_hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
_OPTIONAL = {"intermediate_size", "num_key_value_heads", "head_dim", "tied_embeddings", "max_position_embeddings"}

# Keys that change the model, and the values that leave it as simplan models it (absent and null always do).
_GPT2_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
}
_LLAMA_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
_ALWAYS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "quantization_config": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
}

_FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, tuple[Any, ...]]]] = {
    "gpt2": ("gpt", _GPT2_KEYS, _GPT2_NEUTRAL),
    "llama": ("llama", _LLAMA_KEYS, _LLAMA_NEUTRAL),
    "mistral": ("llama", _LLAMA_KEYS, _LLAMA_NEUTRAL),
}
MODEL_TYPES = tuple(_FAMILIES)
"""Values of ``model_type`` that can be read."""


def model_fields_from_config(config: Mapping[str, Any], *, name: str, seq_len: int | None = None) -> dict[str, Any]:
    """Fields of a ``ModelSpec`` from a Hugging Face config, for ``ModelSpec`` to check and complete.

    Args:
        config: The content of ``config.json``.
        name: Name for the model.
        seq_len: Tokens of one sequence; None means the longest the model knows.

    Raises:
        SpecError: Keys are missing or ``model_type`` is unknown.
        NotModelledError: The config uses options that are not modelled.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        value = render_value(model_type) if model_type is not None else None
        rule = "is missing" if model_type is None else "is a family that is not modelled yet"
        error = SpecError if model_type is None else NotModelledError
        fix = did_you_mean(str(model_type), MODEL_TYPES)
        raise error(Problem(field="model_type", value=value, rule=rule, fix=fix))
    family, keys, neutral = _FAMILIES[model_type]
    missing = [key for field, key in keys.items() if field not in _OPTIONAL and config.get(key) is None]
    if missing:
        raise SpecError([Problem(field=key, rule="is missing", fix=f"a {model_type} config has it") for key in missing])
    _refuse_unmodelled(config, {**_ALWAYS_NEUTRAL, **neutral}, seq_len)
    fields = {field: config[key] for field, key in keys.items() if config.get(key) is not None}
    if "seq_len" not in fields and (longest := fields.get("max_position_embeddings")) is not None:
        fields["seq_len"] = longest
    if seq_len is not None:
        fields["seq_len"] = seq_len
    return {"name": name, "family": family, **fields}


def _refuse_unmodelled(config: Mapping[str, Any], neutral: dict[str, tuple[Any, ...]], seq_len: int | None) -> None:
    problems = []
    for key, values in neutral.items():
        value = config.get(key)
        if value is not None and value not in values:
            fix = f"only {' or '.join(render_value(v) for v in values)} is" if values else "only a config without it is"
            problems.append(Problem(field=key, value=render_value(value), rule="is not modelled yet", fix=fix))
    window = config.get("sliding_window")
    length = seq_len or config.get("max_position_embeddings")
    in_use = window is not None and config.get("use_sliding_window", True)
    if in_use and not (isinstance(window, int) and isinstance(length, int) and window >= length):
        rule = f"attention in a window is not modelled yet, and sequences of {length} tokens use it"
        fix = f"use seq_len = {window} or less, where the window does nothing"
        problems.append(Problem(field="sliding_window", value=render_value(window), rule=rule, fix=fix))
    if problems:
        raise NotModelledError(problems)
