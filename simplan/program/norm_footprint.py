"""Memory in the backward of norms."""

from __future__ import annotations

from simplan.spec.layer import Kernel, LayerSpec, Pointwise
from simplan.spec.software import StateBytes

__all__ = ["norm_workspace"]

_FP32_BYTES = 4


def norm_workspace(layer: LayerSpec, kernel: Kernel, state: StateBytes) -> int:
    """What the backward of a norm needs beside gradients that exist, bytes of one sequence; 0 for other kernels.

    LayerNorm is one kernel. The executor's RMSNorm is on CPUs composed of single operations: at worst it has the
    normalized input, its gradient, a product, a difference, and where numbers are in 16 bits a wider copy of one.
    """
    if not isinstance(kernel, Pointwise):
        return 0
    width = max(p.num_elements for p in layer.parameters if p.name.startswith(f"{kernel.name}."))
    statistics = sum(t.elements for t in layer.saved if t.made_by == kernel.name and t.bytes_per_element)
    if statistics * width != kernel.writes:  # one number for each row
        return 0
    num_wide = 3 if state.residual == _FP32_BYTES else 4
    return kernel.writes * (state.residual + num_wide * _FP32_BYTES)
