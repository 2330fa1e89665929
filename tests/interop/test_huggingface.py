"""Configs equal to the published ``config.json`` files; counts as published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.interop.frameworks import tables
from simplan.interop.huggingface import _read, model_fields_from_config, model_types
from simplan.model.model import ModelSpec
from simplan.predict import predict
from simplan.scenario import load_scenario, scenario_from
from tests.support.problems import refuses, says

GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "vocab_size": 50257,
}  # fmt: skip
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA32_1B = {
    **LLAMA3, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "max_position_embeddings": 131072, "mlp_bias": False, "tie_word_embeddings": True,
    "rope_scaling": {"factor": 32.0, "rope_type": "llama3"},
}  # fmt: skip
MISTRAL = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip

QWEN25 = {
    "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MPT = {
    "attn_config": {"alibi": True, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
                    "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None},
    "d_model": 4096, "expansion_ratio": 4, "learned_pos_emb": True, "max_seq_len": 2048, "model_type": "mpt",
    "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "vocab_size": 50432,
}  # fmt: skip
GEMMA2 = {
    "attention_bias": False, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "vocab_size": 256000,
}  # fmt: skip
PYTHIA = {
    "hidden_act": "gelu", "hidden_size": 5120, "intermediate_size": 20480, "max_position_embeddings": 2048,
    "model_type": "gpt_neox", "num_attention_heads": 40, "num_hidden_layers": 36, "rotary_emb_base": 10000,
    "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50688,
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
    "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "position_embedding_type": "absolute", "type_vocab_size": 2,
    "vocab_size": 30522,
}  # fmt: skip
VIT = {
    "hidden_act": "gelu", "hidden_size": 768, "id2label": {str(i): f"class {i}" for i in range(1000)},
    "image_size": 224, "intermediate_size": 3072, "model_type": "vit", "num_attention_heads": 12, "num_channels": 3,
    "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True,
}  # fmt: skip


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
QWEN3_MOE = {
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


def model(config: dict[str, Any], seq_len: int | None = None) -> ModelSpec:
    return ModelSpec.model_validate(model_fields_from_config(config, name="x", seq_len=seq_len))


@pytest.mark.parametrize(
    ("config", "seq_len", "count"),
    [
        (GPT2, 1024, 124_439_808),
        (LLAMA3, 8192, 8_030_261_248),
        (LLAMA32_1B, 8192, 1_235_814_400),
        (MISTRAL, 8192, 7_241_732_096),
        (QWEN25, 4096, 494_032_768),
        (QWEN3, 4096, 596_049_920),
        (MPT, 2048, 6_649_286_656),
        (GEMMA2, 8192, 9_241_705_984),
        (PYTHIA, 2048, 11_846_072_320),
        (BERT, 512, 109_514_298),
        (VIT, None, 86_567_656),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_parameter_counts_equal_the_published_ones(config: dict[str, Any], seq_len: int | None, count: int) -> None:
    assert model(config, seq_len).num_parameters == count


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (GPT2, "gpt2-124m"),
        (LLAMA3, "llama3-8b"),
        (GEMMA2, "gemma2-9b"),
        (PYTHIA, "pythia-12b"),
        (MIXTRAL, "mixtral-8x7b"),
        (OLMOE, "olmoe-1b-7b"),
        (QWEN15, "qwen1.5-moe-a2.7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (GPT_OSS, "gpt-oss-20b"),
        (GPT_OSS_LARGE, "gpt-oss-120b"),
        (DEEPSEEK2, "deepseek-v2-lite"),
        (DEEPSEEK3, "deepseek-v3"),
    ],
)
def test_a_config_equals_the_preset(config: dict[str, Any], preset: str) -> None:
    """But for the name, and with experts for the longest sequence, which costs nothing with rotary positions."""
    expected = catalog.model(preset)
    ignored = {"name", "sources", *(["max_position_embeddings"] if expected.num_experts else [])}
    read_model = model(config, expected.seq_len)
    assert read_model.model_dump(exclude=ignored) == expected.model_dump(exclude=ignored)
    assert read_model.num_parameters == pytest.approx(catalog.published_parameters(preset), rel=1e-3)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (LLAMA32_1B, "seq_len: is missing: max_position_embeddings = 131072 ... add seq_len: 4096, or seq_len: 131072"),
        (GPT2, "seq_len: is missing: n_positions = 1024 ... add seq_len: 1024"),
        ({key: MPT[key] for key in MPT if key != "max_seq_len"}, "seq_len: is missing; add seq_len: 4096"),
    ],
)  # fmt: skip
def test_the_sequence_length_has_no_default(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        model(config)
    assert says(str(caught.value), sentence)


def test_the_sequence_length_is_that_given() -> None:
    assert model(GPT2, 128).seq_len == 128
    assert model(GPT2, 128).max_position_embeddings == 1024


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({**GPT2, "activation_function": "relu"},
         'activation_function = "relu": is not modeled ... "gelu_new"'),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights = false: is not modeled yet; only true is"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention = true: is not modeled yet"),
        ({**MPT, "ffn_config": {"ffn_type": "mptglu"}},
         'ffn_config.ffn_type = "mptglu": is not modeled ... "te_ln_mlp"'),
        ({**LLAMA3, "mlp_bias": True}, "mlp_bias = true: is not modeled yet"),
        ({**LLAMA3, "hidden_act": "gelu"}, 'hidden_act = "gelu": is not modeled yet'),
        ({**LLAMA3, "num_local_experts": 8}, "num_local_experts = 8: is not modeled yet"),
        ({**LLAMA3, "quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}: is not modeled yet'),
        ({**QWEN25, "use_sliding_window": True, "sliding_window": 4096},
         "sliding_window = 4096: ... not modeled ... 32768"),
        ({**MPT, "no_bias": False}, "no_bias = false: is not modeled yet; only true is"),
        ({**MPT, "attn_config": {"alibi": False}}, "attn_config.alibi = false: is not modeled yet; only true is"),
        ({**BERT, "is_decoder": True}, "is_decoder = true: is not modeled yet; only false is"),
        ({**VIT, "qkv_bias": False}, "qkv_bias = false: is not modeled yet; only true is"),
        ({**LLAMA3, "model_type": "minstral"},
         'model_type = "minstral": ... not modeled'),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step = 2: is not modeled yet; only 1 is"),
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers = [0]: is not modeled yet; only [] is"),
        ({**OLMOE, "clip_qkv": 8.0}, "clip_qkv = 8.0: is not modeled"),
        ({**DEEPSEEK3, "quantization_config": {"fmt": "e4m3"}}, "quantization_config = {"),
        ({**DEEPSEEK3, "attention_bias": True}, "attention_bias = true: is not modeled yet; only false is"),
        ({**QWEN15, "use_sliding_window": True, "sliding_window": 1024}, "sliding_window = 1024: a window in some"),
        ({**LLAMA3, "model_type": "phi3"},
         'model_type = "phi3": ... not modeled ... write ... llama'),
        ({**LLAMA3, "model_type": ["x"]}, 'model_type = ["x"]: is a family that is not modeled yet'),
    ],
)  # fmt: skip
def test_options_that_change_the_model_are_refused_by_name(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotModelledError) as caught:
        model(config, 32768)
    assert says(str(caught.value), sentence)


def test_switches_of_a_config() -> None:
    """Biases of all four matrices, a window, and no window where it is switched off."""
    assert model({**LLAMA3, "attention_bias": True}, 8192).attention_bias
    assert model(MISTRAL, 8192).sliding_window == 4096
    assert model({**MISTRAL, "sliding_window": None}, 8192).sliding_window is None
    assert model(QWEN25, 8192).sliding_window is None
    assert model({key: value for key, value in VIT.items() if key != "num_channels"}).seq_len == 197


def test_missing_keys_are_all_named() -> None:
    config = {key: value for key, value in GPT2.items() if key not in ("n_layer", "n_embd")}
    with pytest.raises(SpecError) as caught:
        model(config)
    assert [problem.field for problem in caught.value.problems] == ["n_layer", "n_embd"]
    with pytest.raises(SpecError, match="model_type: is missing"):
        model({})


def scenario(folder: Path, config: object) -> Path:
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(config))
    path = folder / "a.yaml"
    path.write_text(
        "model: {hf_config: llama/config.json, seq_len: 512}\ncluster: {preset: dgx-h100, num_devices: 1}\n"
        "training: {global_batch_size: 4}\nplan: {}\n"
    )
    return path


def test_a_scenario_names_a_config_relative_to_itself(tmp_path: Path) -> None:
    model = load_scenario(scenario(tmp_path, LLAMA3)).job.model
    assert (model.num_parameters, model.seq_len, model.name) == (8_030_261_248, 512, "llama")


def test_a_bad_config_is_told_in_the_scenario(tmp_path: Path) -> None:
    path = scenario(tmp_path, {**LLAMA3, "mlp_bias": True, "hidden_size": "big"})
    with pytest.raises(NotModelledError) as caught:
        load_scenario(path)
    [problem] = caught.value.problems
    assert (problem.field, problem.value, problem.line, problem.column) == (
        "model.hf_config", '"llama/config.json"', 1, 9
    )  # fmt: skip
    assert "mlp_bias = true: is not modeled" in problem.rule


def test_a_scenario_says_how_long_sequences_are(tmp_path: Path) -> None:
    path = scenario(tmp_path, LLAMA3)
    path.write_text(path.read_text().replace(", seq_len: 512", ""))
    with pytest.raises(SpecError) as caught:
        load_scenario(path)
    [problem] = caught.value.problems
    assert (problem.field, problem.line, problem.column) == ("model.hf_config", 1, 9)
    assert "seq_len: is missing: max_position_embeddings = 8192" in problem.rule
    assert "add seq_len: 4096, or seq_len: 8192" in problem.rule
    path.write_text(path.read_text().replace("config.json", 'config.json, seq_len: "8k"'))
    with refuses("model.seq_len", '"8k"', rule="must be a whole number"):
        load_scenario(path)


def test_length_of_a_config_is_assumed_or_asked_for_as_an_option(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config, length in ((GPT2, 1024), (MPT, 2048), (LLAMA3 | {"max_position_embeddings": 131072}, 4096)):
        file.write_text(json.dumps(config))
        assert scenario_from(file).job.model.seq_len == length
    file.write_text(json.dumps({key: value for key, value in MPT.items() if key != "max_seq_len"}))
    with refuses("", rule="sequences", fix="--seq-len 4096", file=str(file)):
        scenario_from(file)


def test_a_window_of_all_layers_is_taken() -> None:
    assert model({**MIXTRAL, "sliding_window": 1024}, 4096).sliding_window == 1024


@pytest.mark.parametrize(
    ("types", "windows"),
    [
        (["full_attention"] * 24, (0,) * 24),
        (["sliding_attention"] * 24, (128,) * 24),
        ((["sliding_attention"] * 5 + ["full_attention"]) * 4, (128, 128, 128, 128, 128, 0) * 4),
    ],
)
def test_windows_of_some_layers_are_taken(types: list[str], windows: tuple[int, ...]) -> None:
    assert model({**GPT_OSS, "layer_types": types}, 4096).windows == windows


@pytest.mark.parametrize(
    "types", [["full_attention", "sliding_attention"] * 12, ["linear"] * 24, "full_attention", [2]]
)
def test_windows_in_another_order_are_refused(types: object) -> None:
    with refuses("layer_types", rule="is not modeled yet", fix="only sliding_attention", kind=NotModelledError):
        model({**GPT_OSS, "layer_types": types}, 4096)


@pytest.mark.parametrize("types", [["sliding_attention"], ["full_attention"] * 25, []])
def test_each_layer_has_a_type(types: list[str]) -> None:
    with refuses("layer_types", rule="types, and num_hidden_layers = 24", fix="give one for each"):
        model({**GPT_OSS, "layer_types": types}, 4096)


def test_a_checkpoint_in_other_bits_is_refused() -> None:
    with refuses("quantization_config.quant_method", '"gptq"', rule="not modeled", fix="mxfp4", kind=NotModelledError):
        model({**GPT_OSS, "quantization_config": {"quant_method": "gptq"}}, 4096)


def test_experts_must_be_told() -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key not in ("num_experts", "moe_intermediate_size")}
    with pytest.raises(SpecError) as caught:
        model(config, 4096)
    assert [problem.field for problem in caught.value.problems] == ["num_experts", "moe_intermediate_size"]


@pytest.mark.parametrize("value", ["two", [2], True, 1.5])
def test_a_strange_number_of_shared_experts_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="shared_expert_intermediate_size"):
        model({**DEEPSEEK2, "n_shared_experts": value, "moe_intermediate_size": 1408}, 4096)


def test_layers_for_later_tokens_are_read_where_the_software_has_them() -> None:
    fields = [
        model_fields_from_config(config, name="x", seq_len=4096, mtp=mtp)
        for config, mtp in ((DEEPSEEK3, True), (DEEPSEEK3, False), (DEEPSEEK2, True), (QWEN3_MOE, True))
    ]
    assert [read_fields.get("mtp_num_layers") for read_fields in fields] == [1, None, None, None]


@pytest.mark.parametrize(
    ("software", "more", "depths", "said"),
    [
        ("megatron-core", "", 1, []),
        ("megatron-core", ", mtp_num_layers: 0", 0, ["no layer predicts a second token, as mtp_num_layers = 0"]),
        ("torchtitan", "", 0, ["no layer predicts a second token, as mtp_num_layers = 0, which is all that is modeled "
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
    scenario = load_scenario(tmp_path / "case.yaml")
    prediction = predict(scenario.job, name=scenario.name)
    assert scenario.job.model.mtp_num_layers == depths
    assert [sentence for sentence in prediction.assumptions if "second token" in sentence] == said


def test_types_of_other_blocks_are_never_suggested() -> None:
    """Names of versions are alike, and their models are not; a dense model is none with experts."""
    families = {name: kind.family for name, kind in model_types().items()}
    for word, more, known in (("llama4", {"text_config": {"num_local_experts": 16}}, True), ("gemma3", {}, False)):
        with pytest.raises(NotModelledError) as refused:
            model_fields_from_config({**LLAMA3, "model_type": word, **more}, name="x", seq_len=64)
        named = [name for name in families if name in re.findall(r"\w+", refused.value.problems[0].fix)]
        assert named
        assert word.rstrip("0123456789") not in {name.rstrip("0123456789") for name in named}
        assert all((families[name] in ("moe", "deepseek")) == known for name in named)


def test_types_by_numbers_are_of_known_families_and_not_read() -> None:
    by_numbers = tables("model_types")["_by_numbers"]
    families = {kind.family for kind in model_types().values()}
    assert not by_numbers.keys() & model_types().keys()
    assert {text.partition(" and ")[0].removeprefix("family: ") for text in by_numbers.values()} <= families


def test_keys_are_those_that_transformers_writes() -> None:
    """All types of the installed version are read; DeepSeek-V2's default is a model without experts."""
    transformers = pytest.importorskip("transformers")
    missing = {}
    for word, kind in model_types().items():
        if word in transformers.CONFIG_MAPPING and word != "deepseek_v2":
            written = transformers.CONFIG_MAPPING[word]().to_dict()
            required = {key for field, key in kind.keys.items() if field not in kind.optional}
            missing[word] = {key for key in required if _read(written, key) is None}
    assert len(missing) >= 15
    assert {word: keys for word, keys in missing.items() if keys} == {}
