"""Import of Hugging Face ``config.json`` files, for model types that match a model family of simplan exactly.

Keys that change neither shapes nor costs (initializers, token ids, dropout rates, rotary scaling) are accepted. Keys
that change the model in a way that is not modeled raise an error that names the key, unless they have their neutral
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.problems import render_value

_USUAL_LENGTH = 4096
_FULL, _IN_WINDOW = "full_attention", "sliding_attention"
_MAY_MISS = frozenset({
    "num_key_value_heads", "head_dim", "attention_bias", "tied_embeddings", "max_position_embeddings", "sliding_window",
    "q_lora_rank", "num_dense_layers", "shared_expert_intermediate_size", "type_vocab_size", "num_channels",
    "partial_rotary_factor",
})  # fmt: skip
"""Fields that a config may omit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Mapping of one ``model_type`` to ``ModelSpec``.

    Attributes:
        family: Model family of simplan.
        keys: By field of ``ModelSpec``, the key of the config; dots select nested keys.
        optional: Fields that may be missing.
        neutral: Keys that change the model, with the values that leave it as modeled; absent and null always do.
        fixed: Fields of ``ModelSpec`` that no key gives, with their values.
        windows: True if ``sliding_window`` applies to all layers; False if ``use_sliding_window`` enables it for some.
        alternates: True if ``sliding_window`` applies to every second layer, from the first, unless ``layer_types`` is
            set.
        has_sequences: True if the user gives ``seq_len``; False for image models.
        later_tokens: Key with the number of multi-token prediction layers; None if the type has none.
        in_experts: Fields that the config counts in experts of width ``moe_intermediate_size``.
    """

    family: str
    keys: Mapping[str, str]
    optional: frozenset[str] = _MAY_MISS
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    windows: bool = False
    alternates: bool = False
    has_sequences: bool = True
    later_tokens: str | None = None
    in_experts: frozenset[str] = frozenset()


def _same(*names: str) -> dict[str, str]:
    """Keys with the same names as the fields."""
    return {name: name for name in names}


_TIED = {"tied_embeddings": "tie_word_embeddings"}
_WINDOW = _same("sliding_window")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_ALWAYS_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "quantization_config": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
}
_GPT2 = ModelType(
    family="gpt",
    keys={
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        **_TIED,
    },
    optional=_MAY_MISS | {"intermediate_size"},
    neutral={
        **_ALWAYS_NEUTRAL,
        "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "add_cross_attention": (False,),
    },
)
_LLAMA_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


def _llama(*, windows: bool = False, **fixed: Any) -> ModelType:
    """Model type with Llama's keys and further fixed fields."""
    keys = _same(*_LLAMA_KEYS, "attention_bias") | _TIED | (_WINDOW if windows else {})
    neutral = {**_ALWAYS_NEUTRAL, "hidden_act": ("silu", "swish"), "mlp_bias": (False,)}
    return ModelType(family="llama", keys=keys, neutral=neutral, fixed=fixed, windows=windows)


_MPT = ModelType(
    family="mpt",
    keys={
        "num_hidden_layers": "n_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_seq_len",
        **_TIED,
    },
    neutral={
        **_ALWAYS_NEUTRAL,
        "no_bias": (True,),
        "expansion_ratio": (4,),
        "ffn_config.ffn_type": ("mptmlp", "te_ln_mlp"),  # the others have a gate (mptglu, mptgeglu) or experts
        "attn_config.alibi": (True,),
        "attn_config.attn_type": ("multihead_attention",),
        "attn_config.prefix_lm": (False,),
        "attn_config.qk_ln": (False,),
    },
)
_BERT = ModelType(
    family="bert",
    keys=_same(*_SIZES, "vocab_size", "max_position_embeddings", "type_vocab_size") | _TIED,
    optional=_MAY_MISS - {"max_position_embeddings"},
    neutral={
        **_ALWAYS_NEUTRAL,
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
)
_VIT = ModelType(
    family="vit",
    keys=_same(*_SIZES, "image_size", "patch_size", "num_channels") | {"num_classes": "id2label"},
    neutral={**_ALWAYS_NEUTRAL, "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"), "qkv_bias": (True,)},
    has_sequences=False,
)

_NEOX = ModelType(
    family="neox",
    keys=_same(*_SIZES, "vocab_size", "max_position_embeddings") | _TIED | {"partial_rotary_factor": "rotary_pct"},
    neutral={
        **_ALWAYS_NEUTRAL,
        "hidden_act": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        "attention_bias": (True,),
        "use_parallel_residual": (True,),
    },
)
_GEMMA2 = ModelType(
    family="gemma2",
    keys=_same(*_LLAMA_KEYS, "sliding_window") | _TIED,
    optional=_MAY_MISS - {"num_key_value_heads"},
    neutral={
        **_ALWAYS_NEUTRAL,
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (50.0,),
        "final_logit_softcapping": (30.0,),
        "attention_bias": (False,),
    },
    windows=True,
    alternates=True,
)

_EXPERT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "quantization_config": (),
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "clip_qkv": (),
    "decoder_sparse_step": (1,),  # experts in every block
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
}
_OF_ALL = {
    **_same("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"),
    **_TIED,
    "top_k": "num_experts_per_tok",
}
_HEADS = _same("num_key_value_heads", "head_dim", "attention_bias")


def _moe(keys: Mapping[str, str], *, windows: bool = False, **fixed: Any) -> ModelType:
    """Mixture of experts with standard attention."""
    keys = {**_OF_ALL, **_HEADS, **keys, **(_WINDOW if windows else {})}
    return ModelType(family="moe", keys=keys, neutral=_EXPERT_NEUTRAL, fixed=fixed, windows=windows)


_EXPERTS = _same("num_experts", "moe_intermediate_size")
_DEEPSEEK = ModelType(
    family="deepseek",
    keys={
        **_OF_ALL,
        **_same("intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"),
        **_same("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "num_experts": "n_routed_experts",
        "num_dense_layers": "first_k_dense_replace",
        "shared_expert_intermediate_size": "n_shared_experts",
    },
    neutral={**_EXPERT_NEUTRAL, "attention_bias": (False,)},
    later_tokens="num_nextn_predict_layers",
    in_experts=frozenset({"shared_expert_intermediate_size"}),
)
# checkpoints store experts in FP4; training upcasts them on load
_NEUTRAL_OF_GPT_OSS = {key: values for key, values in _EXPERT_NEUTRAL.items() if key != "quantization_config"} | {
    "quantization_config.quant_method": ("mxfp4",)
}
_GPT_OSS = ModelType(
    family="moe",
    keys={
        **_OF_ALL,
        **_HEADS,
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",
        **_WINDOW,
    },
    neutral=_NEUTRAL_OF_GPT_OSS,
    fixed={"attention_bias": True, "attention_sinks": True, "router_bias": True, "expert_bias": True},
    windows=True,
    alternates=True,
)
MODEL_TYPES: Mapping[str, ModelType] = {
    "gpt2": _GPT2,
    "llama": _llama(),
    "mistral": _llama(windows=True),
    "qwen2": _llama(qkv_bias=True),
    "qwen3": _llama(qk_norm="head"),
    "mpt": _MPT,
    "gpt_neox": _NEOX,
    "gemma2": _GEMMA2,
    "bert": _BERT,
    "vit": _VIT,
    "mixtral": _moe({"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}, windows=True),
    "olmoe": _moe({"num_experts": "num_experts", "moe_intermediate_size": "intermediate_size"}, qk_norm="projection"),
    "qwen2_moe": _moe({**_EXPERTS, **_same("shared_expert_intermediate_size")}, qkv_bias=True, shared_expert_gate=True),
    "qwen3_moe": _moe(_EXPERTS, qk_norm="head"),
    "gpt_oss": _GPT_OSS,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
"""Supported model types by ``model_type``. Hugging Face's DeepSeek-V3 omits the multi-token prediction layer."""


def model_fields_from_config(
    config: Mapping[str, Any], *, name: str, seq_len: int | None = None, mtp: bool = False
) -> dict[str, Any]:
    """Convert a Hugging Face config to fields of ``ModelSpec``, which checks and completes them.

    Args:
        config: Content of ``config.json``.
        name: Name of the model.
        seq_len: Tokens per sequence; None only for image models. The config's maximum is no default, since training
            sequences are often much shorter (Llama 3.1: 131,072).
        mtp: Include the multi-token prediction layers, which the software trains. False omits them, as transformers
            does.

    Raises:
        SpecError: Keys or ``seq_len`` are missing or ``model_type`` is unknown.
        NotModelledError: The config uses options that are not modeled yet.
    """
    word = config.get("model_type")
    if word not in tuple(MODEL_TYPES):  # a list or mapping is not hashable
        value = render_value(word) if word is not None else None
        rule = "is missing" if word is None else "is a family that is not modeled yet"
        error = SpecError if word is None else NotModelledError
        raise error(Problem(field="model_type", value=value, rule=rule, fix=did_you_mean(str(word), MODEL_TYPES)))
    kind = MODEL_TYPES[word]
    given = {field: _look_up(config, key) for field, key in kind.keys.items()}
    if isinstance(labels := given.get("num_classes"), Mapping):
        given["num_classes"] = len(labels)
    missing = [kind.keys[field] for field, value in given.items() if value is None and field not in kind.optional]
    if missing:
        raise SpecError([Problem(field=key, rule="is missing", fix=f"a {word} config has it") for key in missing])
    fields = {**kind.fixed, **{field: value for field, value in given.items() if value is not None}}
    if mtp and kind.later_tokens is not None and (layers := _look_up(config, kind.later_tokens)):
        fields["mtp_num_layers"] = layers
    width = fields.get("moe_intermediate_size")
    for counted in kind.in_experts & fields.keys():
        if type(fields[counted]) is int and type(width) is int:  # true is no number of experts
            fields[counted] *= width
    if kind.has_sequences:
        if seq_len is None:
            raise SpecError(_no_length(fields.get("max_position_embeddings"), kind))
        fields["seq_len"] = seq_len
    _refuse_unmodelled(config, kind, fields.get("seq_len"))
    if kind.alternates:
        fields |= _windows(config, fields.pop("sliding_window", None), fields.get("num_hidden_layers"))
    return {"name": name, "family": kind.family, **fields}


def _look_up(config: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key; None if the config lacks it."""
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _windows(config: Mapping[str, Any], window: Any, num_layers: Any) -> dict[str, Any]:
    """Fields for the layers with sliding-window attention.

    Raises:
        SpecError: The number of layer types differs from the number of layers.
        NotModelledError: The pattern is none of: all layers, no layer, all layers except every n-th.
    """
    types = config.get("layer_types")
    if window is None:
        return {}
    if types is None:
        return {"sliding_window": window, "sliding_window_pattern": 2}
    full = [number for number, of in enumerate(types, 1) if of == _FULL] if isinstance(types, list) else []
    every = full[0] if full else 0
    known = isinstance(types, list) and set(map(str, types)) <= {_FULL, _IN_WINDOW}
    if not known or (every and full != list(range(every, len(types) + 1, every))):
        rule = "is not modeled yet"
        fix = f"only {_IN_WINDOW} with {_FULL} in none, every, or every so many layers is"
        raise NotModelledError(Problem(field="layer_types", value=render_value(types), rule=rule, fix=fix))
    if len(types) != num_layers:
        rule = f"has {len(types)} types, and num_hidden_layers = {render_value(num_layers)}"
        raise SpecError(Problem(field="layer_types", rule=rule, fix="give one for each layer"))
    if every == 1:
        return {}
    return {"sliding_window": window, "sliding_window_pattern": every}


def _no_length(longest: Any, kind: ModelType) -> Problem:
    """Error for a missing ``seq_len``, with a usual length as the fix."""
    if not isinstance(longest, int):
        return Problem(field="seq_len", rule="is missing", fix=f"add seq_len: {_USUAL_LENGTH}")
    key = kind.keys["max_position_embeddings"]
    usual = min(longest, _USUAL_LENGTH)
    fix = f"add seq_len: {usual}" + (f", or seq_len: {longest} if they are so long" if longest > usual else "")
    rule = f"is missing: {key} = {longest} is the longest the model takes, not how long yours are"
    return Problem(field="seq_len", rule=rule, fix=fix)


def _refuse_unmodelled(config: Mapping[str, Any], kind: ModelType, length: Any) -> None:
    problems = []
    for key, values in kind.neutral.items():
        value = _look_up(config, key)
        if value is not None and value not in values:
            fix = f"only {' or '.join(render_value(v) for v in values)} is" if values else "only a config without it is"
            problems.append(Problem(field=key, value=render_value(value), rule="is not modeled yet", fix=fix))
    window = config.get("sliding_window")
    in_use = window is not None and config.get("use_sliding_window", kind.windows)
    if in_use and not kind.windows and not (isinstance(window, int) and isinstance(length, int) and window >= length):
        rule = f"a window in some layers is not modeled yet, and sequences of {length} tokens use it"
        fix = f"use seq_len = {window} or less, where the window does nothing"
        problems.append(Problem(field="sliding_window", value=render_value(window), rule=rule, fix=fix))
    if problems:
        raise NotModelledError(problems)
