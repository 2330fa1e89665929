"""One small model of each family and switch, which the executor can run and torch can account for."""

from __future__ import annotations

from typing import Any

from simplan.model.model import ModelSpec

_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 256}
_TOKENS: dict[str, Any] = {"vocab_size": 500, "seq_len": 64}
_LLAMA: dict[str, Any] = {"family": "llama", "num_key_value_heads": 4, **_TOKENS}

PLAIN: dict[str, dict[str, Any]] = {"gpt": {"family": "gpt", **_TOKENS}, "llama": _LLAMA}
VARIANTS: dict[str, dict[str, Any]] = {
    "qkv-bias": {**_LLAMA, "qkv_bias": True},
    "attention-bias": {**_LLAMA, "attention_bias": True},
    "qk-norm": {**_LLAMA, "qk_norm": "head", "head_dim": 16, "tied_embeddings": True},
    "window": {**_LLAMA, "sliding_window": 24},
    "grouped": {"family": "gpt", "num_key_value_heads": 4, **_TOKENS},
    "mpt": {"family": "mpt", **_TOKENS},
    "neox": {"family": "neox", **_TOKENS},
    "gemma2": {"family": "gemma2", "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 24, **_TOKENS},
    "gemma": {"family": "gemma", "num_key_value_heads": 4, "head_dim": 16, **_TOKENS},
    "gemma3": {"family": "gemma3", "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 24, **_TOKENS},
    "bert": {"family": "bert", **_TOKENS},
    "vit": {"family": "vit", "image_size": 32, "patch_size": 4, "num_classes": 10},
}
"""Name -> fields of the model beside its common sizes; ``PLAIN`` ones are those that most tests are about."""


def variant(name: str, **fields: Any) -> ModelSpec:
    """One of them, with fields changed."""
    return ModelSpec(**{**_SIZES, **(PLAIN | VARIANTS)[name], **fields})
