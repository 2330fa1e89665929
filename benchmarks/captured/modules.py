"""Modules of users and of transformers: factories, batches, and configurations of small models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.executor.capture.modules import DiT, Recommender, StateSpaceModel, UNet


def unet() -> nn.Module:
    """U-Net of 0.9 M parameters."""
    return UNet(48, 128)


def unet_batch(number: int) -> tuple[Tensor, ...]:
    """Images of 32 x 32 pixels, and times."""
    return torch.randn(number, 3, 32, 32), torch.rand(number)


def dit() -> nn.Module:
    """Diffusion transformer of 7 M parameters."""
    return DiT(256, 6)


def dit_batch(number: int) -> dict[str, Tensor]:
    """Latents of 16 x 16 pixels, and labels."""
    return {"x": torch.randn(number, 4, 16, 16), "label": torch.randint(10, (number,))}


def scan() -> nn.Module:
    """State-space model of 0.3 M parameters, scanned step by step."""
    return StateSpaceModel(1000, 128)


def scan_batch(number: int) -> tuple[Tensor, ...]:
    """64 tokens."""
    return (torch.randint(1000, (number, 64)),)


def recommender() -> nn.Module:
    """DLRM of 10 M parameters, nearly all of them in tables."""
    return Recommender(8, 20_000, 64)


def recommender_batch(number: int) -> tuple[Tensor, ...]:
    """13 numbers, and six rows of each of eight tables."""
    return torch.randn(number, 13), torch.randint(20_000, (number, 8, 6))


class Mlp(nn.Module):
    """Linear layers in a row, with their loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = (256, 1024, 1024, 1024)
        hidden = [part for k, n in pairwise(widths) for part in (nn.Linear(k, n), nn.GELU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(1024, 10))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return nn.functional.cross_entropy(self.layers(x), label)


def mlp_batch(number: int) -> tuple[Tensor, ...]:
    """256 numbers, and a class."""
    return torch.randn(number, 256), torch.randint(10, (number,))


_SMALL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "whisper": (
        {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": 128,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 512,
            "decoder_ffn_dim": 512,
            "max_source_positions": 100,
            "vocab_size": 2000,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        64,
    ),
    "clip": (
        {
            "model_type": "clip",
            "architectures": ["CLIPModel"],
            "projection_dim": 64,
            "text_config": {**_SMALL, "num_hidden_layers": 4, "vocab_size": 2000, "max_position_embeddings": 64},
            "vision_config": {**_SMALL, "num_hidden_layers": 4, "image_size": 64, "patch_size": 8},
        },
        64,
    ),
    "vit": (
        {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            **_SMALL,
            "num_hidden_layers": 6,
            "image_size": 64,
            "patch_size": 8,
        },
        1,
    ),
    "resnet": (
        {
            "model_type": "resnet",
            "architectures": ["ResNetForImageClassification"],
            "embedding_size": 32,
            "hidden_sizes": [32, 64, 128, 256],
            "depths": [2, 2, 2, 2],
            "layer_type": "basic",
        },
        1,
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "vocab_size": 2000,
            "sliding_window": 32,
        },
        128,
    ),
}
"""``config.json`` and tokens of a sample, by name."""
