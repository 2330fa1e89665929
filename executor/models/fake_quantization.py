"""Simulated quantization of linear layers with torchao's fake quantizers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from simplan.model.fake_quantization import FakeQuantization, fake_quantized
from simplan.model.layer import LayerSpec


def simulate(layer: nn.Module, spec: LayerSpec, form: FakeQuantization) -> None:
    """Replaces linear layers of a layer by those that simulate few bits, in place; weights stay the same tensors."""
    from torchao.quantization import quantize_  # an extra
    from torchao.quantization.qat import QATConfig

    weights = _weight_config(form)
    activations = weights if form.weights == "mxfp4" else _activation_config(form)
    pairs = zip(layer.named_parameters(), spec.parameters, strict=True)
    names = {f"{gemm.name}.weight" for gemm in fake_quantized(spec)}
    paths = {path.removesuffix(".weight") for (path, _), said in pairs if said.name in names}
    quantize_(
        layer,
        QATConfig(weight_config=weights, activation_config=activations),
        filter_fn=lambda module, path: isinstance(module, nn.Linear) and path in paths,
    )


def _weight_config(form: FakeQuantization) -> Any:
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig, Int4WeightFakeQuantizeConfig

    size = form.inputs_per_scale
    match form.weights:
        case "int4":
            return Int4WeightFakeQuantizeConfig(group_size=size, activation_dtype=torch.bfloat16)
        case "int4_fp8":
            return Int4WeightFakeQuantizeConfig(group_size=size, activation_dtype=torch.float8_e4m3fn)
        case "intx_int4":
            return IntxFakeQuantizeConfig(cast(Any, torch).int4, group_size=size)
        case "fp8":
            return Float8FakeQuantizeConfig()
        case "mxfp4":
            return MXFakeQuantizeConfig()


def _activation_config(form: FakeQuantization) -> Any:
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig

    if form.activations is None:
        return None
    if form.activations == "fp8":
        return Float8FakeQuantizeConfig()
    return IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
