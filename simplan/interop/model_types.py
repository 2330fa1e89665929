"""Supported Hugging Face model types: keys for the fields of ``ModelSpec``, and modeled options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplan.interop.expert_types import EXPERT_TYPES
from simplan.interop.model_type import ModelType, same_names

__all__ = ["MODEL_TYPES"]

_Neutral = Mapping[str, tuple[Any, ...]]


_ALWAYS_NEUTRAL: _Neutral = {
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
        "tied_embeddings": "tie_word_embeddings",
    },
    optional=frozenset({"intermediate_size", "tied_embeddings", "max_position_embeddings"}),
    neutral={
        **_ALWAYS_NEUTRAL,
        "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "add_cross_attention": (False,),
    },
)
_SAME_NAMES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "attention_bias",
)
_LLAMA_OPTIONAL = frozenset({
    "num_key_value_heads", "head_dim", "tied_embeddings", "max_position_embeddings", "attention_bias", "sliding_window",
})  # fmt: skip


def _llama(*, windows: bool = False, **fixed: Any) -> ModelType:
    """Model type with Llama's keys and further fixed fields."""
    keys = same_names(*_SAME_NAMES) | {"tied_embeddings": "tie_word_embeddings"}
    if windows:
        keys["sliding_window"] = "sliding_window"
    neutral = {**_ALWAYS_NEUTRAL, "hidden_act": ("silu", "swish"), "mlp_bias": (False,)}
    return ModelType(family="llama", keys=keys, optional=_LLAMA_OPTIONAL, neutral=neutral, fixed=fixed, windows=windows)


_MPT = ModelType(
    family="mpt",
    keys={
        "num_hidden_layers": "n_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_seq_len",
        "tied_embeddings": "tie_word_embeddings",
    },
    optional=frozenset({"max_position_embeddings", "tied_embeddings"}),
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
    keys={
        **same_names("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        **same_names("max_position_embeddings", "type_vocab_size"),
        "tied_embeddings": "tie_word_embeddings",
    },
    optional=frozenset({"type_vocab_size", "tied_embeddings"}),
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
    keys={
        **same_names("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
        **same_names("image_size", "patch_size", "num_channels"),
        "num_classes": "id2label",
    },
    optional=frozenset({"num_channels"}),
    neutral={
        **_ALWAYS_NEUTRAL,
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
        "qkv_bias": (True,),
    },
    has_sequences=False,
)

_NEOX = ModelType(
    family="neox",
    keys={
        **same_names("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        "max_position_embeddings": "max_position_embeddings",
        "tied_embeddings": "tie_word_embeddings",
        "partial_rotary_factor": "rotary_pct",
    },
    optional=frozenset({"max_position_embeddings", "tied_embeddings", "partial_rotary_factor"}),
    neutral={
        **_ALWAYS_NEUTRAL,
        "hidden_act": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        "attention_bias": (True,),
        "use_parallel_residual": (True,),
    },
)
_GEMMA2 = ModelType(
    family="gemma2",
    keys={
        **same_names(*(name for name in _SAME_NAMES if name != "attention_bias")),
        "sliding_window": "sliding_window",
        "tied_embeddings": "tie_word_embeddings",
    },
    optional=frozenset({"head_dim", "max_position_embeddings", "tied_embeddings", "sliding_window"}),
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
    **EXPERT_TYPES,
}
"""Supported model types by ``model_type``."""
