"""LoRA (Hu et al. 2021, arXiv:2106.09685): linear layers with adapters, and frozen parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simplan.model.layer import LayerSpec, ParameterSpec

_SCALE = 2.0  # alpha / r with the usual alpha = 2 r; it changes nothing that is predicted
_INIT_STD = 0.02  # also of B: with zeros no gradient of A would say anything


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

    def base(self, x: Tensor) -> Tensor:
        """The layer without its adapter."""
        return functional.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        return self.adapted(self.base(x), self.lora_a(x), self.lora_b.weight)

    @staticmethod
    def adapted(output: Tensor, narrow: Tensor, b: Tensor) -> Tensor:
        """X W^T + b (..., n) with what B makes of x A^T (..., r) added."""
        return torch.add(output, functional.linear(narrow, b), alpha=_SCALE)


def add_adapter(linear: nn.Module, a: ParameterSpec, b: ParameterSpec, dtype: torch.dtype) -> None:
    """Adds an adapter to a linear layer of any class, in place, as PEFT runs it: y + (x A^T) B^T scale.

    A and B are drawn from torch's generator. They are cast where the module computes in another dtype than theirs.
    """
    (rank, k), (n, _) = a.shape, b.shape
    device = next(linear.parameters()).device
    for name, rows, columns in (("lora_a", rank, k), ("lora_b", n, rank)):
        factor = nn.Linear(columns, rows, bias=False, device="meta")
        drawn = torch.empty(rows, columns).normal_(0.0, _INIT_STD)
        factor.weight = nn.Parameter(drawn.to(device, dtype))
        linear.add_module(name, factor)
    linear.register_forward_hook(_adapted)


def _adapted(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    (x,) = inputs
    low = functional.linear(x, linear.lora_a.weight.to(x.dtype))
    return output + functional.linear(low, linear.lora_b.weight.to(x.dtype)) * _SCALE


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
