"""Hugging Face model types of mixtures of experts: keys for the fields of ``ModelSpec``; see ``ModelType``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplan.interop.model_type import ModelType, same_names

__all__ = ["EXPERT_TYPES"]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "quantization_config": (),
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "clip_qkv": (),
    "decoder_sparse_step": (1,),  # experts in every block
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
}
_OF_ALL = same_names("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size") | {
    "max_position_embeddings": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "top_k": "num_experts_per_tok",
}
_HEADS = same_names("num_key_value_heads", "head_dim", "attention_bias")
_MAY_MISS = frozenset({
    "num_key_value_heads", "head_dim", "attention_bias", "tied_embeddings", "max_position_embeddings", "sliding_window",
    "q_lora_rank", "num_dense_layers", "shared_expert_intermediate_size",
})  # fmt: skip


def _moe(keys: Mapping[str, str], *, windows: bool = False, **fixed: Any) -> ModelType:
    """Mixture of experts with standard attention."""
    more = same_names("sliding_window") if windows else {}
    return ModelType(
        family="moe",
        keys={**_OF_ALL, **_HEADS, **keys, **more},
        optional=_MAY_MISS,
        neutral=_NEUTRAL,
        fixed=fixed,
        windows=windows,
    )


_EXPERTS = same_names("num_experts", "moe_intermediate_size")
_DEEPSEEK = ModelType(
    family="deepseek",
    keys={
        **_OF_ALL,
        **same_names("intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"),
        **same_names("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "num_experts": "n_routed_experts",
        "num_dense_layers": "first_k_dense_replace",
        "shared_expert_intermediate_size": "n_shared_experts",
    },
    optional=_MAY_MISS,
    neutral={**_NEUTRAL, "attention_bias": (False,)},
    later_tokens="num_nextn_predict_layers",
    in_experts=frozenset({"shared_expert_intermediate_size"}),
)
# checkpoints store experts in FP4; training upcasts them on load
_NEUTRAL_OF_GPT_OSS = {key: values for key, values in _NEUTRAL.items() if key != "quantization_config"} | {
    "quantization_config.quant_method": ("mxfp4",)
}
_GPT_OSS = ModelType(
    family="moe",
    keys={
        **_OF_ALL,
        **_HEADS,
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",
        "sliding_window": "sliding_window",
    },
    optional=_MAY_MISS,
    neutral=_NEUTRAL_OF_GPT_OSS,
    fixed={"attention_bias": True, "attention_sinks": True, "router_bias": True, "expert_bias": True},
    windows=True,
    alternates=True,
)
EXPERT_TYPES: Mapping[str, ModelType] = {
    "mixtral": _moe(
        {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        windows=True,
    ),
    "olmoe": _moe({"num_experts": "num_experts", "moe_intermediate_size": "intermediate_size"}, qk_norm="projection"),
    "qwen2_moe": _moe(
        {**_EXPERTS, **same_names("shared_expert_intermediate_size")}, qkv_bias=True, shared_expert_gate=True
    ),
    "qwen3_moe": _moe(_EXPERTS, qk_norm="head"),
    "gpt_oss": _GPT_OSS,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
"""Model types by ``model_type``. Hugging Face's DeepSeek-V3 omits the multi-token prediction layer."""
