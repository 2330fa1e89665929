"""Layers of given kernels, for tests that ask for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simplan.model.layer import Kernel, LayerKind, LayerSpec, Operator, ParameterSpec


def layer_of_kernels(
    kernels: Sequence[Kernel],
    parameters: Sequence[ParameterSpec] = (),
    *,
    kind: LayerKind = LayerKind.BLOCK,
    **fields: Any,
) -> LayerSpec:
    """A layer that runs these kernels and saves nothing; a parameter ``a.weight`` belongs to the kernel ``a``."""
    operators = tuple(
        Operator(kernel=k, parameters=tuple(p.name for p in parameters if p.name.startswith(f"{k.name}.")))
        for k in kernels
    )
    return LayerSpec(kind=kind, parameters=tuple(parameters), operators=operators, **fields)
