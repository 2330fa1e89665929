"""Linear layers in FP8 by torchao's ``Float8Linear``, on CUDA devices and CPUs alike.

torchao is an extra (``simplan[float8]``), imported where a job is in FP8. Its linear layer casts its input under the
autocast of CUDA devices alone, so a hook casts it first, as torch.autocast does for other linear layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from executor.models.norms import compute_dtype
from simplan.model.layer import LayerSpec
from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe, linears

__all__ = ["with_fp8_linears"]


def with_fp8_linears(module: nn.Module, layer: LayerSpec, recipe: Fp8Recipe = DEFAULT_RECIPE) -> nn.Module:
    """Replaces the linear layers of a block that run in FP8; their parameters stay.

    Args:
        module: Module of the layer.
        layer: Spec of the layer, whose matmuls have the names of the modules.
        recipe: One of ``TORCHAO_RECIPES``.
    """
    names = {gemm.name for gemm in linears(layer)}
    found = {path: _last(path) for path, _ in module.named_modules() if _last(path) in names}
    assert set(found.values()) == names, names
    if not found:
        return module
    with _quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(module, module_filter_fn=lambda _, path: path in found, config=config)
    for path in found:
        module.get_submodule(path).register_forward_pre_hook(_cast_input)
    return module


def _cast_input(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return compute_dtype(*inputs)


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
