"""What Hugging Face's model types call the fields of a ``ModelSpec``, and which of their options are modelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MODEL_TYPES", "ModelType"]

_Neutral = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """One value of ``model_type``.

    Attributes:
        family: Which family of models it is.
        keys: By field of ``ModelSpec``, the key of the config; dots lead into mappings.
        optional: Fields that may be missing.
        neutral: Keys that change the model, and the values that leave it as simplan models it (absent and null
            always do).
        fixed: Fields that no key says.
        windows: ``sliding_window`` is that of all layers; else of some, where ``use_sliding_window`` is set.
        has_sequences: Sequences are as long as the user says.
    """

    family: str
    keys: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    neutral: _Neutral = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    windows: bool = False
    has_sequences: bool = True

    def read(self, config: Mapping[str, Any], name: str) -> Any:
        """Value of a field of ``ModelSpec``; None where the config does not have it."""
        value = self.look_up(config, self.keys[name])
        return len(value) if name == "num_classes" and isinstance(value, Mapping) else value

    def look_up(self, config: Mapping[str, Any], key: str) -> Any:
        """Value of a key, perhaps inside of mappings."""
        found: Any = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


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
    """Llama's keys, with what a model type adds to its layers."""
    keys = {name: name for name in _SAME_NAMES} | {"tied_embeddings": "tie_word_embeddings"}
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
        "attn_config.alibi": (True,),
        "attn_config.attn_type": ("multihead_attention",),
        "attn_config.prefix_lm": (False,),
        "attn_config.qk_ln": (False,),
    },
)
_BERT = ModelType(
    family="bert",
    keys={
        **{
            name: name
            for name in (
                "num_hidden_layers",
                "hidden_size",
                "num_attention_heads",
                "intermediate_size",
                "vocab_size",
                "max_position_embeddings",
                "type_vocab_size",
            )
        },
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
        **{
            name: name
            for name in (
                "num_hidden_layers",
                "hidden_size",
                "num_attention_heads",
                "intermediate_size",
                "image_size",
                "patch_size",
                "num_channels",
            )
        },
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

MODEL_TYPES: Mapping[str, ModelType] = {
    "gpt2": _GPT2,
    "llama": _llama(),
    "mistral": _llama(windows=True),
    "qwen2": _llama(qkv_bias=True),
    "qwen3": _llama(qk_norm="head"),
    "mpt": _MPT,
    "bert": _BERT,
    "vit": _VIT,
}
"""Values of ``model_type`` that can be read."""
