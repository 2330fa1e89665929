"""Configs of mixtures of experts equal to the published ``config.json`` files, against the catalogue's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.interop.huggingface import model_fields_from_config
from simplan.model.model import ModelSpec
from simplan.predict import predict
from simplan.scenario import load_scenario

MIXTRAL = {
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
OLMOE = {
    "attention_bias": False, "clip_qkv": None, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
    "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
    "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
QWEN15 = {
    "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
    "max_position_embeddings": 8192, "max_window_layers": 21, "mlp_only_layers": [], "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT_OSS = {
    "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_LARGE = {  # whose own config does not say which layers have windows
    **{key: value for key, value in GPT_OSS.items() if key != "layer_types"}, "num_hidden_layers": 36,
    "num_local_experts": 128,
}  # fmt: skip
DEEPSEEK2 = {
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "tie_word_embeddings": False,
    "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK3 = {
    "attention_bias": False, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "tie_word_embeddings": False, "topk_group": 4, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def model(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate(model_fields_from_config(config, name="x", seq_len=4096))


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (MIXTRAL, "mixtral-8x7b"),
        (OLMOE, "olmoe-1b-7b"),
        (QWEN15, "qwen1.5-moe-a2.7b"),
        (QWEN3, "qwen3-30b-a3b"),
        (GPT_OSS, "gpt-oss-20b"),
        (GPT_OSS_LARGE, "gpt-oss-120b"),
        (DEEPSEEK2, "deepseek-v2-lite"),
        (DEEPSEEK3, "deepseek-v3"),
    ],
)
def test_a_config_equals_the_preset(config: dict[str, Any], preset: str) -> None:
    """But for the name and for the longest sequence, which costs nothing with rotary positions."""
    ignored = {"name", "sources", "max_position_embeddings"}
    found, expected = model(config), catalog.model(preset)
    assert found.model_dump(exclude=ignored) == expected.model_dump(exclude=ignored)
    assert found.num_parameters == pytest.approx(catalog.published_parameters(preset), rel=1e-3)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({**QWEN3, "decoder_sparse_step": 2}, "decoder_sparse_step = 2: is not modelled yet; only 1 is"),
        ({**QWEN3, "mlp_only_layers": [0]}, "mlp_only_layers = [0]: is not modelled yet; only [] is"),
        ({**OLMOE, "clip_qkv": 8.0}, "clip_qkv = 8.0: is not modelled yet; only a config without it is"),
        ({**DEEPSEEK3, "quantization_config": {"fmt": "e4m3"}}, "quantization_config = {"),
        ({**DEEPSEEK3, "attention_bias": True}, "attention_bias = true: is not modelled yet; only false is"),
        ({**QWEN15, "use_sliding_window": True, "sliding_window": 1024}, "sliding_window = 1024: a window in some"),
    ],
)
def test_options_that_change_the_model_are_refused_by_name(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotModelledError) as caught:
        model(config)
    assert str(caught.value).startswith(sentence)


def test_a_window_of_all_layers_is_taken() -> None:
    assert model({**MIXTRAL, "sliding_window": 1024}).sliding_window == 1024


@pytest.mark.parametrize(
    ("types", "windows"),
    [
        (["full_attention"] * 24, (0,) * 24),
        (["sliding_attention"] * 24, (128,) * 24),
        ((["sliding_attention"] * 5 + ["full_attention"]) * 4, (128, 128, 128, 128, 128, 0) * 4),
    ],
)
def test_windows_of_some_layers_are_taken(types: list[str], windows: tuple[int, ...]) -> None:
    assert model({**GPT_OSS, "layer_types": types}).windows == windows


@pytest.mark.parametrize(
    "types", [["full_attention", "sliding_attention"] * 12, ["linear"] * 24, "full_attention", [2]]
)
def test_windows_in_another_order_are_refused(types: object) -> None:
    with pytest.raises(NotModelledError, match=r"layer_types = .*: is not modelled yet; only sliding_attention with"):
        model({**GPT_OSS, "layer_types": types})


@pytest.mark.parametrize("types", [["sliding_attention"], ["full_attention"] * 25, []])
def test_each_layer_has_a_type(types: list[str]) -> None:
    with pytest.raises(SpecError, match=r"layer_types: has \d+ types, and num_hidden_layers = 24; give one for each"):
        model({**GPT_OSS, "layer_types": types})


def test_a_checkpoint_in_other_bits_is_refused() -> None:
    with pytest.raises(NotModelledError) as caught:
        model({**GPT_OSS, "quantization_config": {"quant_method": "gptq"}})
    assert str(caught.value) == 'quantization_config.quant_method = "gptq": is not modelled yet; only "mxfp4" is'


def test_experts_must_be_told() -> None:
    config = {key: value for key, value in QWEN3.items() if key not in ("num_experts", "moe_intermediate_size")}
    with pytest.raises(SpecError) as caught:
        model(config)
    assert [problem.field for problem in caught.value.problems] == ["num_experts", "moe_intermediate_size"]


@pytest.mark.parametrize("value", ["two", [2], True, 1.5])
def test_a_strange_number_of_shared_experts_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="shared_expert_intermediate_size"):
        model({**DEEPSEEK2, "n_shared_experts": value, "moe_intermediate_size": 1408})


def test_layers_for_later_tokens_are_read_where_the_software_has_them() -> None:
    fields = [
        model_fields_from_config(config, name="x", seq_len=4096, mtp=mtp)
        for config, mtp in ((DEEPSEEK3, True), (DEEPSEEK3, False), (DEEPSEEK2, True), (QWEN3, True))
    ]
    assert [found.get("mtp_num_layers") for found in fields] == [1, None, None, None]


@pytest.mark.parametrize(
    ("software", "more", "depths", "said"),
    [
        ("megatron-core", "", 1, []),
        ("megatron-core", ", mtp_num_layers: 0", 0, ["no layer predicts a second token, as mtp_num_layers = 0"]),
        ("torchtitan", "", 0, ["no layer predicts a second token, as mtp_num_layers = 0, which is all that is modelled "
                               "with torchtitan"]),
    ],
)  # fmt: skip
def test_a_scenario_says_what_is_left_out(
    software: str, more: str, depths: int, said: list[str], tmp_path: Path
) -> None:
    small = {"num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "n_routed_experts": 16}
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK3 | small))
    (tmp_path / "case.yaml").write_text(
        f"model: {{hf_config: config.json, seq_len: 512{more}}}\ncluster: {{preset: dgx-h100, num_nodes: 1}}\n"
        f"training: {{global_batch_size: 8}}\nsoftware: {software}\nplan: {{dp_replicate: 8}}\n"
    )
    asked = load_scenario(tmp_path / "case.yaml")
    found = predict(asked.job, name=asked.name)
    assert asked.job.model.mtp_num_layers == depths
    assert [sentence for sentence in found.assumptions if "second token" in sentence] == said
