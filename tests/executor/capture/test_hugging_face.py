"""Architectures of transformers, from configurations of few layers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from benchmarks.architectures import judged_kind, small_config
from executor.capture.capture import model_from_module
from executor.capture.hugging_face import batch_of, module_of_config
from simplan.errors import SpecError
from simplan.model.captured.layers import captured_layers
from simplan.model.layer import Attention
from simplan.model.model import ModelSpec
from tests.executor.capture.test_capture import NUM_SAMPLES, really_saved, saved
from tests.support.slow import slow_except

pytest.importorskip("transformers")

KINDS = {
    "deepseek_v3": 2, "mamba2": 2, "whisper": 4, "clip": 4, "bit": 8, "wav2vec2": 9, "llava": 4, "dinov3_vit": 2,
    "t5": 4, "bart": 4, "bert": 2, "bloom": 2, "blip": 4, "blip-2": 6, "cohere": 2, "cohere2": 4, "convnext": 4,
    "deberta": 2, "deberta-v2": 2, "deepseek_v2": 2, "deit": 2, "dinov2": 2, "distilbert": 2, "efficientnet": 55,
    "electra": 2, "ernie4_5_moe": 2, "exaone4": 4, "falcon": 2, "falcon_h1": 2, "gemma": 2, "gemma2": 4, "gemma3": 6,
    "gemma3_text": 4, "glm4": 2, "glm4_moe": 2, "gpt2": 2, "gpt_bigcode": 2, "gpt_neox": 2, "gpt_oss": 4, "gptj": 2,
    "granite": 2, "granitemoe": 2, "hiera": 8, "hubert": 9, "jamba": 2, "levit": 16, "lfm2": 4, "llama": 2, "llama4": 6,
    "mamba": 2, "mbart": 4, "ministral": 2, "mistral": 2, "mistral3": 2, "mixtral": 2, "modernbert": 4, "mpt": 2,
    "olmo2": 2, "olmo3": 4, "opt": 2, "paligemma": 4, "pegasus": 4, "phi": 2, "phi3": 2, "qwen2": 2, "qwen2_moe": 2,
    "qwen3": 2, "qwen3_moe": 2, "qwen3_next": 4, "qwen3_vl": 2, "regnet": 32, "resnet": 8, "roberta": 2, "segformer": 4,
    "siglip": 4, "smollm3": 4, "stablelm": 2, "starcoder2": 2, "swin": 8, "vit": 2, "vit_mae": 2, "xlm-roberta": 2,
    "zamba2": 4,
}  # fmt: skip
"""Blocks of a model with few layers, by model_type; the first ones differ most, and run always."""
NUM_FAST = 3
RETURNED = {"siglip": 0.03}
"""Relative difference of saved bytes where forward returns tensors, which are held and not saved."""
SOLVERS = {"qwen3_next": 0.006}
"""Relative difference of backward FLOPs where the backward of a triangular solve has matmuls."""


@pytest.mark.parametrize("kind", slow_except([*KINDS][:NUM_FAST], KINDS))
def test_a_capture_has_the_parameters_saved_bytes_and_flops_of_torch(kind: str) -> None:
    judged = judged_kind(kind)
    assert not judged.refused
    assert judged.has_all
    assert judged.num_blocks == KINDS[kind]
    assert judged.saved == pytest.approx(0, abs=RETURNED.get(kind, 0.005))
    assert judged.forward == pytest.approx(0, abs=1e-4)
    assert judged.backward in (None, pytest.approx(0, abs=SOLVERS.get(kind, 1e-4)))


NARROW: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
    "bart": {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 16},
}


@pytest.mark.parametrize("kind", NARROW)
def test_attention_is_that_of_a_run_with_data(kind: str) -> None:
    """Causal and without a mask, which transformers leaves out where it sees that there is no padding."""
    module, config = module_of_config(small_config(kind) | NARROW[kind] | {"vocab_size": 96, "pad_token_id": 0})
    batch = batch_of(module, config, 16)
    layers = captured_layers(model_from_module(module, batch, precisions=("fp32",)))
    attentions = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Attention)]
    assert sum(kernel.causal for kernel in attentions) == 2
    assert not any(kernel.masked for kernel in attentions)
    with_data = module.to_empty(device="cpu").train()
    with torch.no_grad():
        for tensor in (*with_data.parameters(), *with_data.buffers()):
            tensor.zero_()
    assert saved(layers, "fp32") == pytest.approx(really_saved(with_data, batch(NUM_SAMPLES), "fp32"), rel=1e-3)


_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "GPT-2": ({"model_type": "gpt2"}, 124_439_808),
    "BERT base": ({"model_type": "bert", "architectures": ["BertModel"]}, 109_482_240),
    "Llama 3.1 8B": (
        {**_WIDE, "model_type": "llama", "num_hidden_layers": 32, "intermediate_size": 14_336, "vocab_size": 128_256},
        8_030_261_248,
    ),
    "Mistral 7B": (
        {**_WIDE, "model_type": "mistral", "num_hidden_layers": 32, "intermediate_size": 14_336, "vocab_size": 32_000},
        7_241_732_096,
    ),
    "Mixtral 8x7B": (
        {**_WIDE, "model_type": "mixtral", "num_hidden_layers": 32, "intermediate_size": 14_336, "vocab_size": 32_000},
        46_702_792_704,
    ),
    "Qwen3 8B": (
        {
            **_WIDE, "model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12_288, "head_dim": 128,
            "vocab_size": 151_936, "tie_word_embeddings": False,
        },
        8_190_735_360,
    ),
    "Gemma 2 2B": ({"model_type": "gemma2", "num_hidden_layers": 26}, 2_614_341_888),
    "Whisper large-v3": (
        {
            "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "vocab_size": 51_866,
            "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120, "num_mel_bins": 128,
        },
        1_543_490_560,
    ),
    "CLIP ViT-L/14": (
        {
            "model_type": "clip", "projection_dim": 768,
            "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
            "vision_config": {
                "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
        427_616_513,
    ),
    # huggingface.co/api, safetensors of google/gemma-3-4b-it, as kvfit's scripts/build_registry.py (2026) has it
    "Gemma 3 4B": (
        {
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8,
                "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
            },
            "vision_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                "image_size": 896, "patch_size": 14, "vision_use_head": False,
            },
        },
        4_300_079_472,
    ),
    # the same, of unsloth's copy of meta-llama/Llama-4-Scout-17B-16E-Instruct
    "Llama 4 Scout": (
        {
            "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
                "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "num_local_experts": 16, "vocab_size": 202_048,
            },
            "vision_config": {
                "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
                "image_size": 336, "patch_size": 14, "vision_output_dim": 4096, "projector_input_dim": 4096,
                "projector_output_dim": 4096,
            },
        },
        108_641_793_536,
    ),
    # the same, of Qwen/Qwen3-Coder-Next, which has the shapes of Qwen3-Next-80B-A3B and no multi-token prediction
    "Qwen3-Next": (
        {
            "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 5120,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "vocab_size": 151_936, "tie_word_embeddings": False,
        },
        79_674_391_296,
    ),
    # the same, of Qwen/Qwen3-VL-8B-Instruct: {"BF16": 8767123696}
    "Qwen3-VL 8B": (
        {
            "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": {
                "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
            },
            "vision_config": {
                "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
                "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
            },
        },
        8_767_123_696,
    ),
    # the same, of PrimeIntellect/INTELLECT-3, which is GLM-4.5-Air without its layer of multi-token prediction
    "GLM-4.5-Air": (
        {
            "model_type": "glm4_moe", "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10_944,
            "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "first_k_dense_replace": 1,
            "attention_bias": True, "use_qk_norm": False, "vocab_size": 151_552, "tie_word_embeddings": False,
        },
        106_852_251_264,
    ),
    # a sum over the headers of the checkpoint's files, without scales of FP8 and multi-token prediction
    "DeepSeek-V3": ({"model_type": "deepseek_v3"}, 671_026_419_200),
    # n_parameters of google/siglip-base-patch16-224 in the model card of MTEB; KerasHub has 203,156,230 with positions
    "SigLIP base": ({"model_type": "siglip"}, 203_155_970),
    # HiQ's print_model of facebook/dinov2-base
    "DINOv2 base": ({"model_type": "dinov2", "image_size": 518}, 86_580_480),
    "ViT-B/16": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000},
        86_567_656,
    ),
    "ResNet-50": (
        {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "num_labels": 1000},
        25_557_032,
    ),
}  # fmt: skip
"""Configurations of published checkpoints with their numbers of parameters: of their files on Hugging Face, and of
torchvision's table of weights for the last two. Biases of routers' scores, which files have, are buffers of
transformers. Whisper large-v3 and CLIP ViT-L/14 were looked up again, as those with a comment, on 2026-11-30."""


@pytest.mark.parametrize("name", slow_except(["GPT-2"], PUBLISHED))
def test_a_published_checkpoint_has_its_parameters(name: str) -> None:
    data, num_parameters = PUBLISHED[name]
    module, config = module_of_config(data)
    captured = model_from_module(module, batch_of(module, config, 16), precisions=("bf16",))
    of_scores = [b.numel() for key, b in module.named_buffers() if key.endswith("e_score_correction_bias")]
    num_captured = ModelSpec(name=name, family="captured", captured=captured).num_parameters
    assert num_captured + sum(of_scores) == num_parameters


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("siglip2", r"siglip2/modeling_siglip2\.py, line \d+: failed with AttributeError"),
    ],
)
def test_an_architecture_that_cannot_be_captured_says_where(kind: str, said: str) -> None:
    assert re.search(said, judged_kind(kind).refused)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"model_type": "nothing"}, "model_type = nothing: is no model_type of transformers "),
        ({"model_type": "olmo2", "hidden_size": "wide"}, "model_type = olmo2: transformers cannot build the model"),
    ],
)
def test_a_configuration_that_transformers_does_not_take(data: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        module_of_config(data)
