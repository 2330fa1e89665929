"""Which share of a layer's time some of its kernels take, when only the whole layer was timed."""

from __future__ import annotations

from simplan.model.layer import Attention, Exchange, Gemm, Kernel, LayerSpec, Lookup, Pointwise, has_backward
from simplan.program.memory.split_footprint import weighted_kernels
from simplan.program.program import LayerWork, Phase

__all__ = ["weight_share"]

_FLOPS_PER_ELEMENT = 32
"""Operations of a matrix product in the time that one element takes to or from memory: a CPU core's 40 GFLOP/s in fp32
beside 5 GB/s. It only divides up a time that was measured."""

_SCORE_PASSES = 8  # over scores that are tensors: those of the products, of the bias and of the softmax


def weight_share(work: LayerWork) -> float:
    """Weight of the kernels that run over the weight of all: FLOPs, plus elements moved; exchanges weigh nothing.

    Args:
        work: Forward, recomputation or backward of a layer or of a part of it.
    """
    if work.kernels is None:
        return 1.0
    kernels = work.layer.kernels
    parts = [_weight(kernel) * _times(work.layer, kernel, work.phase) for kernel in kernels]
    return sum(parts[index] for index in work.kernels) / (sum(parts) or 1)


def _times(layer: LayerSpec, kernel: Kernel, phase: Phase) -> int:
    """How often a phase does what forward does of a kernel, as far as kernels differ in it.

    A whole backward does all of them about twice, but of a matrix one product where its weight is frozen or its input
    needs no gradient, and what nothing trained is below of not at all. Of its two parts, each has one product of every
    matrix; gradients of activations are all in the first one, and what is left for the second is to sum up what
    reached other weights.
    """
    if phase is Phase.BACKWARD_INPUT:
        return 0 if isinstance(kernel, Lookup) else 1 if isinstance(kernel, Gemm) else 2
    if phase is Phase.BACKWARD_WEIGHT:
        return int(kernel in weighted_kernels(layer))
    if phase is Phase.BACKWARD:
        return kernel.backward_products if isinstance(kernel, Gemm) else 2 * has_backward(kernel)
    return 1


def _weight(kernel: Kernel) -> int:
    match kernel:
        case Gemm(m=m, n=n):
            elements = m * n + kernel.input_elements + kernel.weight_elements
            return kernel.computed_flops + _FLOPS_PER_ELEMENT * elements
        case Attention(num_heads=heads, num_key_value_heads=kv_heads, seq_len=queries):
            widths = kernel.head_dim + (kernel.value_head_dim or kernel.head_dim)
            elements = widths * (heads * queries + kv_heads * (kernel.num_keys or queries))
            elements += _SCORE_PASSES * kernel.num_scores if kernel.eager else 0
            return kernel.computed_flops + _FLOPS_PER_ELEMENT * elements
        case Pointwise(reads=reads, writes=writes):
            return _FLOPS_PER_ELEMENT * (reads + writes)
        case Lookup(rows=rows, width=columns):
            return _FLOPS_PER_ELEMENT * 2 * rows * columns
        case Exchange():
            return 0
