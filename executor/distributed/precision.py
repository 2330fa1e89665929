"""Dtypes of a job: of weights and of compute; FP8 linear layers by torchao's ``Float8Linear``.

torchao is an extra (``simplan[float8]``), imported where a job is in FP8. Its linear layer casts its input under the
autocast of CUDA devices alone, so a hook casts it first, as torch.autocast does for other linear layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from executor.models.norms import as_matmul_dtype
from simplan.model.layer import LayerSpec
from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe, linears
from simplan.runs.run_spec import RunSpec


def weight_dtype(job: RunSpec) -> torch.dtype:
    """Weights, gradients and optimizer states: fp32, also in mixed precision; bf16 without it; fp64 for checking."""
    if job.dtype == "fp64":
        return torch.float64
    return torch.bfloat16 if job.training.pure_bf16 else torch.float32


def compute_dtype(job: RunSpec) -> torch.dtype | None:
    """Dtype of matmuls where it differs from ``weight_dtype``; None where it does not."""
    return torch.bfloat16 if job.dtype == "bf16" and not job.training.pure_bf16 else None


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
        keeps_copies: Autocast caches the cast weights until the end of forward, including unused ones.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device_type: str, *, keeps_copies: bool = True) -> None:
        super().__init__()
        self.module = module
        self._dtype, self._device_type, self._keeps_copies = dtype, device_type, keeps_copies

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        """The module's output."""
        with torch.autocast(self._device_type, self._dtype, cache_enabled=self._keeps_copies):
            out: Tensor | tuple[Tensor, ...] = self.module(*inputs, **named)
        return out


def with_fp8_linears(module: nn.Module, layer: LayerSpec, recipe: Fp8Recipe = DEFAULT_RECIPE) -> nn.Module:
    """Replaces the linear layers of a block that run in FP8; their parameters stay.

    Args:
        layer: Spec of the layer, whose matmuls have the names of the modules, or their paths (captured models).
        recipe: One of ``TORCHAO_RECIPES``.
    """
    names = {gemm.name for gemm in linears(layer)}
    called = {path: path if path in names else _last(path) for path, _ in module.named_modules()}
    paths_of_linears = {path: name for path, name in called.items() if name in names}
    assert set(paths_of_linears.values()) == names, names
    if not paths_of_linears:
        return module
    with _quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(module, module_filter_fn=lambda _, path: path in paths_of_linears, config=config)
    for path in paths_of_linears:
        module.get_submodule(path).register_forward_pre_hook(_cast_input)
    return module


def _cast_input(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return as_matmul_dtype(*inputs)


def _last(path: str) -> str:
    """Name of a matrix in a LayerSpec: ``mlp.shared.up`` is shared_up."""
    return path.replace("shared.", "shared_").rpartition(".")[2]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torchao's warnings that this torch cannot load its kernels, none of which training in FP8 calls."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
