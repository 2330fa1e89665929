"""ResNet's layers: images (batch, channels, height, width) to classes (batch, 1, num_classes).

Batch norms take the statistics of the microbatch they see, on this rank alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention_cores import LayerRequest
from executor.models.norms import as_matmul_dtype
from simplan.model.families.resnet import BlockForm, block_forms


class ResNetStem(nn.Module):
    """A convolution with norm and ReLU, and the maxima of overlapping squares of 3 x 3 pixels."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self.conv1 = nn.Conv2d(spec.num_channels, spec.embedding_size, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(spec.embedding_size)

    def forward(self, images: Tensor) -> Tensor:
        """Images to a quarter of their height and width."""
        x = functional.relu_(self.bn1(self.conv1(images)))
        return functional.max_pool2d(x, 3, stride=2, padding=1)


class ResNetBlock(nn.Module, ABC):
    """Residual block: a branch of convolutions, norms and ReLUs, added to the input.

    Attributes:
        num_convolutions: Number of convolutions of the branch.
    """

    num_convolutions: ClassVar[int]

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        self._make_branch(form)
        self._has_shortcut = form.has_shortcut
        if form.has_shortcut:
            self.shortcut = nn.Conv2d(form.channels, form.outputs, 1, stride=form.stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(form.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to images, some with more channels and a quarter of the pixels."""
        y = x
        for number in range(1, self.num_convolutions + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            if number < self.num_convolutions:
                y = functional.relu_(y)
        y += self.shortcut_norm(self.shortcut(x)) if self._has_shortcut else x
        return functional.relu_(y)

    @abstractmethod
    def _make_branch(self, form: BlockForm) -> None:
        """The convolutions and norms of the branch."""


class BasicBlock(ResNetBlock):
    """Two convolutions of 3 x 3 pixels, of which the first strides."""

    num_convolutions = 2

    def _make_branch(self, form: BlockForm) -> None:
        self.conv1 = nn.Conv2d(form.channels, form.width, 3, stride=form.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(form.width)
        self.conv2 = nn.Conv2d(form.width, form.outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(form.outputs)


class BottleneckBlock(ResNetBlock):
    """A convolution of single pixels that narrows, one of 3 x 3 pixels that strides, one that widens."""

    num_convolutions = 3

    def _make_branch(self, form: BlockForm) -> None:
        self.conv1 = nn.Conv2d(form.channels, form.width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(form.width)
        self.conv2 = nn.Conv2d(form.width, form.width, 3, stride=form.stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(form.width)
        self.conv3 = nn.Conv2d(form.width, form.outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(form.outputs)


class ResNetHead(nn.Module):
    """Means over all pixels, and the classes by them."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self.fc = nn.Linear(block_forms(spec)[-1].outputs, spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, 1, num_classes)."""
        means = torch.mean(x, dim=(-2, -1)).unsqueeze(1)
        logits: Tensor = self.fc(as_matmul_dtype(means))
        return logits


def resnet_block(request: LayerRequest) -> ResNetBlock:
    """Basic or bottleneck, by the model."""
    form = block_forms(request.spec)[request.index - 1]
    return BasicBlock(form) if request.spec.layer_type == "basic" else BottleneckBlock(form)
