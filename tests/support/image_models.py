"""Small configurations of models of images and text, with the size of an image."""

from __future__ import annotations

from typing import Any

_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = {**_TOWER, "model_type": "clip_vision_model"}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "image_size": 112, "head_dim": 16}
_GRID = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "intermediate_size": 64,
    "out_hidden_size": 64,
}  # fmt: skip
_QWEN3 = {**_GRID, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SECTIONS = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_PARTIAL = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502}
_GEMMA4 = {
    **_TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "global_head_dim": 16,
    "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

IMAGE_MODELS: dict[str, tuple[dict[str, Any], tuple[int, int] | None]] = {
    "llava": (
        {"image_token_index": 500, "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP},
        None,
    ),
    "smolvlm": (
        {"image_token_id": 500, "scale_factor": 2, "text_config": {**_TEXT, "model_type": "llama"},
         "vision_config": _TOWER},
        (56, 112),
    ),
    "qwen2_5_vl": (
        {**_TOKENS, "text_config": _SECTIONS,
         "vision_config": {**_GRID, "fullatt_block_indexes": [1], "window_size": 56}},
        (84, 140),
    ),
    "qwen2_vl": (
        {**_TOKENS, "text_config": _SECTIONS,
         "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14,
                           "spatial_merge_size": 2, "mlp_ratio": 2}},
        (56, 84),
    ),
    "qwen3_vl": ({**_TOKENS, "text_config": _SECTIONS, "vision_config": _QWEN3}, (64, 96)),
    "qwen3_vl_moe": ({**_TOKENS, "text_config": {**_SECTIONS, **_EXPERTS}, "vision_config": _QWEN3}, (64, 96)),
    "qwen3_5": (
        {**_TOKENS,
         "text_config": {**_TEXT, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                         "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                         "rope_parameters": {**_PARTIAL, "mrope_interleaved": True}},
         "vision_config": {**_QWEN3, "deepstack_visual_indexes": []}},
        (64, 96),
    ),
    "llava_next": (
        {"image_token_index": 500, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
         "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP},
        (100, 80),
    ),
    "pixtral": (
        {"model_type": "llava", "image_token_index": 500, "vision_feature_layer": -1,
         "vision_feature_select_strategy": "full", "text_config": {**_TEXT, "model_type": "mistral"},
         "vision_config": _PIXTRAL},
        (56, 84),
    ),
    "mistral3": (
        {"image_token_index": 500, "spatial_merge_size": 2, "vision_feature_layer": -1,
         "text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": _PIXTRAL},
        (56, 84),
    ),
    "gemma3": (
        {"image_token_index": 500, "mm_tokens_per_image": 4,
         "text_config": {**_TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
                         "query_pre_attn_scalar": 16},
         "vision_config": _SIGLIP},
        None,
    ),
    "gemma4": (
        {"image_token_id": 500, "video_token_id": 501, "text_config": {**_GEMMA4, "hidden_size_per_layer_input": 16},
         "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 16}},
        (96, 144),
    ),
    "gemma4_unified": (
        {"image_token_id": 500, "video_token_id": 501, "text_config": _GEMMA4,
         "vision_config": {"patch_size": 16, "mm_embed_dim": 64, "output_proj_dims": 64}},
        (96, 144),
    ),
    "mllama": (
        {"image_token_index": 500, "text_config": {**_TEXT, "cross_attention_layers": [1]},
         "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
                           "attention_heads": 2, "image_size": 56, "patch_size": 14, "max_num_tiles": 4,
                           "intermediate_layers_indices": [0, 1], "vision_output_dim": 96}},
        (112, 56),
    ),
    "llama4": (
        {"image_token_index": 500,
         "text_config": {**_TEXT, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
                         "interleave_moe_layer_step": 2},
         "vision_config": {**_TOWER, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 64,
                           "projector_input_dim": 64, "projector_output_dim": 64}},
        (112, 112),
    ),
    "idefics3": (
        {"image_token_id": 500, "scale_factor": 2, "text_config": {**_TEXT, "model_type": "llama"},
         "vision_config": _TOWER},
        None,
    ),
    "lfm2_vl": (
        {"image_token_id": 500, "downsample_factor": 2, "projector_hidden_size": 64,
         "text_config": {**_TEXT, "model_type": "lfm2", "block_ff_dim": 96, "block_multiple_of": 16,
                         "layer_types": ["conv", "full_attention"]},
         "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "patch_size": 16, "num_patches": 64,
                           "model_type": "siglip2_vision_model"}},
        (64, 96),
    ),
    "internvl": (
        {"image_token_id": 500, "text_config": {**_TEXT, "model_type": "qwen2"},
         "vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]}},
        (56, 112),
    ),
    "glm4v": (
        {"image_token_id": 500, "video_token_id": 501, "image_start_token_id": 503, "image_end_token_id": 504,
         "text_config": {**_TEXT, "rope_parameters": _PARTIAL},
         "vision_config": {**_GRID, "image_size": 56, "temporal_patch_size": 2}},
        (56, 84),
    ),
    "paddleocr_vl": (
        {**_TOKENS, "text_config": _SECTIONS, "vision_config": {**_TOWER, "spatial_merge_size": 2}},
        (56, 84),
    ),
    "paligemma": (
        {"image_token_index": 500, "projection_dim": 64, "text_config": {**_TEXT, "model_type": "gemma"},
         "vision_config": {**_SIGLIP, "projection_dim": 64}},
        None,
    ),
}  # fmt: skip
"""``model_type``, where the configuration names no other -> configuration, and height and width of an image."""


def image_config(kind: str) -> dict[str, Any]:
    """Configuration of a model, with its ``model_type``."""
    return {"model_type": kind} | IMAGE_MODELS[kind][0]
