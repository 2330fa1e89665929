"""Architectures of transformers, from small configurations."""

from __future__ import annotations

from typing import Any

import pytest

from executor.capture.capture import model_from_module
from executor.capture.hugging_face import batch_of, module_of_config
from simplan.errors import SpecError
from simplan.model.model import ModelSpec
from tests.executor.conftest import slow_except

transformers = pytest.importorskip("transformers")

DECODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
}
TEXT = {**VISION, "vocab_size": 96, "max_position_embeddings": 64}
SPEECH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 96,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 32,
    "max_target_positions": 32, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "gemma3_text": ({**DECODER, "head_dim": 8}, 3),
    "olmo2": (DECODER, 3),
    "phi3": (DECODER, 3),
    "granite": (DECODER, 3),
    "smollm3": (DECODER, 3),
    "clip": ({"vision_config": {**VISION, "patch_size": 16}, "text_config": TEXT, "projection_dim": 16}, 4),
    "siglip": ({"vision_config": {**VISION, "patch_size": 16}, "text_config": TEXT}, 4),
    "whisper": (SPEECH, 4),
}
"""Configuration and number of blocks by model_type."""


@pytest.mark.parametrize("kind", slow_except(["gemma3_text", "clip"], CONFIGS))
def test_parameters_and_blocks_are_those_of_transformers(kind: str) -> None:
    data, num_blocks = CONFIGS[kind]
    module, config = module_of_config({"model_type": kind, **data})
    captured = model_from_module(module, batch_of(module, config, 16), precisions=("bf16",))
    model = ModelSpec(name=kind, family="captured", captured=captured)
    assert model.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert len([name for name in captured.modules if name]) == num_blocks
    assert captured.unused == ()


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
