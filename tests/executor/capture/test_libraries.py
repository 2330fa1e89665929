"""Models of timm, diffusers and torchvision, where these are installed, against torch's own counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.architectures import judged


def images(number: int) -> tuple[Tensor]:
    return (torch.zeros(number, 3, 224, 224),)


def noise(number: int) -> dict[str, Tensor]:
    """Batch of a UNet with cross-attention to 77 tokens."""
    steps, tokens = torch.zeros(number, dtype=torch.long), torch.zeros(number, 77, 32)
    return {"sample": torch.zeros(number, 4, 32, 32), "timestep": steps, "encoder_hidden_states": tokens}


def patches(number: int) -> dict[str, Tensor]:
    steps = torch.zeros(number, dtype=torch.long)
    return {"hidden_states": torch.zeros(number, 4, 32, 32), "timestep": steps, "class_labels": steps.clone()}


def backbone(library: Any) -> nn.Module:
    module: nn.Module = library.models.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).backbone
    return module


MODELS: dict[str, tuple[str, Callable[[Any], nn.Module], Callable[[int], Any]]] = {
    "resnet50": ("timm", lambda timm: timm.create_model("resnet50"), images),
    "convnext_tiny": ("timm", lambda timm: timm.create_model("convnext_tiny"), images),
    "efficientnet_b0": ("timm", lambda timm: timm.create_model("efficientnet_b0"), images),
    "unet": (
        "diffusers",
        lambda diffusers: diffusers.UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            norm_num_groups=8,
        ),
        noise,
    ),
    "dit": (
        "diffusers",
        lambda diffusers: diffusers.DiTTransformer2DModel(4, 16, in_channels=4, num_layers=3, sample_size=32),
        patches,
    ),
    "torchvision resnet50": ("torchvision", lambda torchvision: torchvision.models.resnet50(), images),
    "backbone of Mask R-CNN": ("torchvision", backbone, images),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_capture_has_the_parameters_saved_bytes_and_flops_of_torch(name: str) -> None:
    library, make, batch = MODELS[name]
    with torch.device("meta"):
        module = make(pytest.importorskip(library))
    verdict = judged(module, batch)
    assert verdict.has_all
    assert verdict.saved == pytest.approx(0, abs=0.015 if "Mask" in name else 1e-4)  # its outputs are held, not saved
    assert verdict.forward == pytest.approx(0, abs=1e-4)
    assert verdict.backward == pytest.approx(0, abs=1e-4)
