"""Dtypes of a job: of weights and of compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe
from simplan.runs.run_spec import RunSpec

__all__ = ["Autocast", "allow_tf32", "compute_dtype", "fp8_recipe", "weight_dtype"]


def weight_dtype(job: RunSpec) -> torch.dtype:
    """Weights, gradients and optimizer states: fp32, also in mixed precision; fp64 for checking."""
    return torch.float64 if job.dtype == "fp64" else torch.float32


def compute_dtype(job: RunSpec) -> torch.dtype | None:
    """Dtype of matmuls where it differs from ``weight_dtype``; None where it does not."""
    return torch.bfloat16 if job.dtype == "bf16" else None


def fp8_recipe(job: RunSpec) -> Fp8Recipe | None:
    """Scaling of linear layers of blocks that are in FP8, all else as in BF16; None where they are not."""
    in_fp8 = job.training.precision == "fp8" and job.dtype == "bf16"
    return (job.training.fp8_recipe or DEFAULT_RECIPE) if in_fp8 else None


def allow_tf32(*, allowed: bool) -> None:
    """Allows or forbids TF32 for FP32 matmuls and convolutions; torch's default allows it for convolutions only."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


class Autocast(nn.Module):
    """A module run under ``torch.autocast``: weights are cast for matmuls, once per forward.

    Args:
        module: The module.
        dtype: Dtype of matmuls.
        device_type: Device type of the module.
        keeps_copies: Autocast caches the cast weights until the end of forward, including unused ones.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device_type: str, *, keeps_copies: bool = True) -> None:
        super().__init__()
        self.module = module
        self._dtype, self._device_type, self._keeps_copies = dtype, device_type, keeps_copies

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The module's output."""
        with torch.autocast(self._device_type, self._dtype, cache_enabled=self._keeps_copies):
            out: Tensor | tuple[Tensor, ...] = self.module(*inputs)
        return out
