"""Normalization layers that save the tensors of LayerSpec for backward, and the dtype of their outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simplan.model.model import ModelSpec

_EPS = 1e-5


def make_norm(spec: ModelSpec) -> nn.Module:
    """RMSNorm for Llama and its kin, LayerNorm for the other families, without bias for MPT."""
    if spec.family in ("llama", "moe", "deepseek", "gemma", "gemma2", "gemma3"):
        return RMSNorm(spec.hidden_size)
    return nn.LayerNorm(spec.hidden_size, eps=_EPS, bias=spec.family != "mpt")


def as_matmul_dtype(x: Tensor) -> Tensor:
    """Tensor in the dtype of matmuls: autocast's dtype under autocast, so that it is cast once and not per matmul."""
    if x.dtype is torch.float32 and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a weight, over the last dimension."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        if x.is_cuda:
            return functional.rms_norm(x, self.weight.shape, self.weight, _EPS)
        out: Tensor = _LeanRMSNorm.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class _LeanRMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number per row for backward, as torch's CUDA kernel does.

    torch's RMSNorm on the CPU consists of separate operations and saves another tensor of the input's size.
    With r = rsqrt(mean(x^2) + eps): y = x r w; dx = r (w dy - x r^2 mean(w dy x)); dw = sum of dy x r over rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(_wide(x).square().mean(dim=-1, keepdim=True) + _EPS)
        ctx.save_for_backward(x, weight, scale)
        return ((x * scale).to(x.dtype) * weight).to(x.dtype)  # heads are narrower than their weights under autocast

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        (grad,) = grad_outputs
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * weight
        mean = (grad_normed * normed).mean(dim=-1, keepdim=True)
        return ((grad_normed - normed * mean) * scale).to(x.dtype), grad_weight.to(weight.dtype)


def _wide(x: Tensor) -> Tensor:
    """At least fp32: squares of 16-bit numbers are summed exactly enough only there."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
