"""LoRA (Hu et al. 2021, arXiv:2106.09685): linear layers with adapters, and frozen parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simplan.model.layer import LayerSpec

_SCALE = 2.0  # alpha / r with the usual alpha = 2 r; it changes nothing that is predicted


class LoraLinear(nn.Linear):
    """y = x W^T + b + scale (x A^T) B^T (equation 3); its parameters are called as PEFT and torchtune call them.

    Attributes:
        lora_a, lora_b: A (r x k) and B (n x r).
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        k, n = linear.in_features, linear.out_features
        super().__init__(k, n, bias=linear.bias is not None)
        self.lora_a = nn.Linear(k, rank, bias=False)
        self.lora_b = nn.Linear(rank, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        return self.adapted(functional.linear(x, self.weight, self.bias), self.lora_a(x), self.lora_b.weight)

    @staticmethod
    def adapted(output: Tensor, narrow: Tensor, b: Tensor) -> Tensor:
        """X W^T + b (..., n) with what B makes of x A^T (..., r) added."""
        return torch.add(output, functional.linear(narrow, b), alpha=_SCALE)


def add_adapters(layer: nn.Module, spec: LayerSpec, rank: int) -> None:
    """Adds LoRA adapters to the matrices of a module that have adapters in its LayerSpec."""
    adapted = {p.name.removesuffix(".lora_a.weight") for p in spec.parameters if p.name.endswith(".lora_a.weight")}
    specs = zip(list(layer.named_parameters()), [p for p in spec.parameters if ".lora_" not in p.name], strict=True)
    for (name, _), parameter in specs:
        if parameter.name.removesuffix(".weight") in adapted:
            path, _, last = name.removesuffix(".weight").rpartition(".")
            parent = layer.get_submodule(path)
            setattr(parent, last, LoraLinear(parent.get_submodule(last), rank))  # type: ignore[arg-type]


def freeze(layer: nn.Module, spec: LayerSpec, dtype: torch.dtype) -> None:
    """Freezes parameters that are not trained, and casts them to the precision in which they are used."""
    for (path, parameter), said in zip(list(layer.named_parameters()), spec.parameters, strict=True):
        if said.frozen:
            owner, _, name = path.rpartition(".")
            frozen = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            layer.get_submodule(owner).register_parameter(name, frozen)


def trained_parameters(module: nn.Module) -> list[Any]:
    """Parameters that require gradients, in the module's order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
