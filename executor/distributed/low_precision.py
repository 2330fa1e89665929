"""Linear layers in fp8 with one scale a tensor, found anew in every pass.

What torchao's Float8Linear does by default (torchao/float8 of pytorch/ao at 36027d82): e4m3 for input and weight, e5m2
for the gradient, scales of the largest element to the largest number there is, the three products by
``torch._scaled_mm``; input and weight are kept as they are and quantized again in backward. Operands are written in the
layout that CUDA's kernels want, whose inner dimension is the one that is added up, so that nothing is transposed after.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from executor.models.norms import compute_dtype
from simplan.spec.layer import LayerSpec
from simplan.spec.low_precision import linears

__all__ = ["Fp8Linear", "Quantized", "quantize", "with_fp8_linears"]

_INPUT, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST = 1e-12  # of a largest element, so that zeros have a scale
_CHUNK = 2**18  # elements that a CPU has in fp32 at a time; a GPU would launch a kernel for each


class Quantized(NamedTuple):
    """A matrix in 8 bits: about ``data * inverse_scale``.

    Attributes:
        data: (m, k), contiguous.
        inverse_scale: One number, fp32.
    """

    data: Tensor
    inverse_scale: Tensor


def quantize(x: Tensor, dtype: torch.dtype) -> Quantized:
    """Quantizes a matrix.

    Args:
        x: (m, k).
        dtype: One of torch's 8-bit floating-point formats.
    """
    return _cast(x, dtype, (False,))[0]


def _cast(x: Tensor, dtype: torch.dtype, transposed: tuple[bool, ...]) -> list[Quantized]:
    """Quantizes a matrix (m, k), and its transpose (k, m), or one of them, with one scale."""
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    limit = torch.finfo(dtype).max
    scale = (limit / largest.double().clamp(min=_LEAST)).float()
    made = [torch.empty(x.shape[::-1] if turned else x.shape, dtype=dtype, device=x.device) for turned in transposed]
    step = len(x) if x.is_cuda else max(1, _CHUNK // x.shape[1])
    for start in range(0, len(x), step):
        part = x[start : start + step].to(torch.float32, copy=True).mul_(scale).to(dtype)  # at most the limit, rounded
        for data, turned in zip(made, transposed, strict=True):
            (data.T if turned else data)[start : start + step] = part
    return [Quantized(data, scale.reciprocal()) for data in made]


class Fp8Linear(nn.Linear):
    """A linear layer whose products are in fp8; its weight is what ``nn.Linear``'s was."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Fp8Linear:
        """With the same parameters."""
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in the precision of matrix products."""
        out: Tensor = _Fp8Product.apply(compute_dtype(x), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def with_fp8_linears(module: nn.Module, layer: LayerSpec) -> nn.Module:
    """Replaces the linear layers of a block that low precision is for.

    Args:
        module: What runs the layer.
        layer: Its spec, whose products are called as the modules are.
    """
    names = {gemm.name for gemm in linears(layer)}
    for path, linear in list(module.named_modules()):
        owner, _, name = path.rpartition(".")
        if name in names:
            assert isinstance(linear, nn.Linear), path
            setattr(module.get_submodule(owner), name, Fp8Linear.of(linear))
    return module


class _Fp8Product(torch.autograd.Function):
    """x W' + bias, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = _product(quantize(x.reshape(-1, x.shape[-1]), _INPUT), quantize(weight, _INPUT), x.dtype)
        if bias is not None:
            y += bias.to(y.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = grad_outputs[0].reshape(-1, weight.shape[0])
        grad_bias = None if ctx.bias_dtype is None else gradient.sum(0, dtype=ctx.bias_dtype)
        copies = _cast(gradient, _GRADIENT, (True, False))  # each is gone when its product is done
        grad_x = _product(copies.pop(), _cast(weight, _INPUT, (True,))[0], x.dtype)
        inputs = x.reshape(-1, x.shape[-1])
        grad_weight = _product(copies.pop(), _cast(inputs, _INPUT, (True,))[0], weight.dtype)
        return grad_x.view(x.shape), grad_weight, grad_bias


def _product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """(m, n), of (m, k) and (n, k)."""
    return torch._scaled_mm(a.data, b.data.T, scale_a=a.inverse_scale, scale_b=b.inverse_scale, out_dtype=dtype)
