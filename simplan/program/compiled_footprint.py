"""Memory of the backward of a compiled block, whose gradients of weights all come at its end.

Eager torch adds a gradient to those that are held as soon as it is made. A compiled backward is one function: what it
gives is alive until it returns, while what forward kept goes with its last use.
"""

from __future__ import annotations

from collections.abc import Iterator

from simplan.program.expert_footprint import copied_weight_bytes
from simplan.program.moment import Moment
from simplan.spec.layer import Gemm, LayerSpec
from simplan.spec.recompute import Recomputation
from simplan.spec.software import StateBytes

__all__ = ["compiled_moments"]


def compiled_moments(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, recomputation: Recomputation
) -> Iterator[Moment]:
    """After the products of each matrix, from the last to the first: its gradients and those before, less what is gone.

    Args:
        layer: The block.
        microbatch_size: Sequences b.
        state: Element widths.
        recomputation: What of the layer is kept.
    """
    b, gradients, gone = microbatch_size, 0, 0
    kept = {kernel.name: 0 for kernel in layer.kernels}
    for tensor in recomputation.saved:
        if tensor.made_by in kept:
            times = 1 if tensor.of_microbatch else b
            kept[tensor.made_by] += times * tensor.num_bytes(state.activation, state.residual)
    residual = b * layer.made_elements * state.residual
    for kernel in reversed(layer.kernels):
        if isinstance(kernel, Gemm):
            copied = copied_weight_bytes(layer, kernel, state)
            width = state.gradient if copied else state.product
            gradients += kernel.n * kernel.k * width if kernel.trained else 0
            handed_on = b * kernel.m * kernel.k * state.activation
            yield Moment(residual + handed_on - gone, gradients=gradients)
            gone += copied
        gone += kept[kernel.name]
