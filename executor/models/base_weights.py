"""Frozen weights of few bits below adapters: bitsandbytes' NF4 and FP4, and torchao's NF4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from executor.models.lora import DoraLinear, LoraLinear
from simplan.model.base_weights import BaseWeights, stored_experts, stored_weights
from simplan.model.layer import LayerSpec

_BF16_BYTES = 2
_STORAGE = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def quantize(layer: nn.Module, spec: LayerSpec, base: BaseWeights) -> None:
    """Stores frozen matrices of a layer in few bits, in place.

    Args:
        layer: Layer whose frozen weights have the precision in which they are used.
        spec: The layer with adapters, without the form of its weights.
        base: Form of the weights.
    """
    stored = stored_weights(spec, base.stored(_BF16_BYTES))
    pairs = zip(list(layer.named_parameters()), spec.parameters, strict=True)
    for path, parameter in [(path, parameter) for (path, parameter), said in pairs if said.name in stored]:
        owner, _, name = path.rpartition(".")
        module = layer.get_submodule(owner)
        assert isinstance(module, nn.Linear), path
        if base.library == "torchao":
            module.register_parameter(name, _of_torchao(parameter.detach(), base))
            if isinstance(module, DoraLinear):
                module.whole = lambda module=module: module.weight.get_original_weight()  # type: ignore[misc]
            continue
        quantized = _of_bitsandbytes(parameter.detach(), base)
        state, width = quantized.quant_state, parameter.dtype
        module.register_parameter(name, quantized)
        unpacks = _Unpacking(module, state, width)
        if isinstance(module, DoraLinear):
            module.whole = unpacks.weight
        if isinstance(module, LoraLinear):
            module.base = unpacks  # type: ignore[assignment,method-assign]
        else:
            module.forward = unpacks  # type: ignore[assignment,method-assign]
    if base.experts:
        names = {said.name: path for (path, _), said in zip(layer.named_parameters(), spec.parameters, strict=True)}
        for experts in stored_experts(spec):
            owner, _, name = names[experts].rpartition(".")
            _quantize_experts(layer.get_submodule(owner), name, base)


def _quantize_experts(module: nn.Module, name: str, base: BaseWeights) -> None:
    """Stores the experts of a module in few bits, which it unpacks where it reads them."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit  # an extra

    double, kind = base.double_quantization, base.format
    assert kind in ("nf4", "fp4"), kind
    replace_parameter_4bit(module, name, double, kind, base.elements_per_scale)


class _Unpacking:
    """The linear layer of a module whose weight is packed, as bitsandbytes' Linear4bit runs it."""

    def __init__(self, module: nn.Linear, state: Any, width: torch.dtype) -> None:
        self._module, self._state, self._width = module, state, width

    def weight(self) -> Tensor:
        """The unpacked weight (n x k)."""
        from bitsandbytes.functional import dequantize_4bit  # an extra

        whole: Tensor = dequantize_4bit(self._module.weight.data, self._state)
        return whole.to(self._width)

    def __call__(self, x: Tensor, /) -> Tensor:
        """(..., k) to (..., n)."""
        from bitsandbytes import matmul_4bit  # an extra

        weight, bias = self._module.weight, self._module.bias
        narrow = None if bias is None else bias.to(self._width)
        out: Tensor = matmul_4bit(x.to(self._width), weight.data.t(), self._state, bias=narrow)
        return out.to(x.dtype)


def _of_bitsandbytes(weight: Tensor, base: BaseWeights) -> Any:
    from bitsandbytes.nn import Params4bit  # an extra

    made = Params4bit(
        weight.contiguous(),
        requires_grad=False,
        blocksize=base.elements_per_scale,
        compress_statistics=base.double_quantization,
        quant_type=base.format,
        quant_storage=_STORAGE[base.storage],
    )
    return made if made.bnb_quantized else made.to(weight.device)


def _of_torchao(weight: Tensor, base: BaseWeights) -> nn.Parameter:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # an extra

    return nn.Parameter(to_nf4(weight, base.elements_per_scale, 256), requires_grad=False)
