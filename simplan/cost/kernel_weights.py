"""Which share of a layer's time some of its kernels take, when only the whole layer was timed."""

from __future__ import annotations

from simplan.program.program import LayerWork
from simplan.spec.layer import Attention, Exchange, Gemm, Kernel, Lookup, Pointwise

__all__ = ["weight_share"]

_FLOPS_PER_ELEMENT = 32
"""Operations of a matrix product in the time that one element takes to or from memory: a CPU core's 40 GFLOP/s in fp32
beside 5 GB/s. It only divides up a time that was measured."""


def weight_share(work: LayerWork) -> float:
    """Weight of the kernels that run over the weight of all: FLOPs, plus elements moved; exchanges weigh nothing.

    Args:
        work: Forward, recomputation or backward of a layer or of a part of it.
    """
    kernels = work.layer.kernels
    if work.kernels is None:
        return 1.0
    whole = sum(_weight(kernel) for kernel in kernels)
    return sum(_weight(kernels[index]) for index in work.kernels) / whole


def _weight(kernel: Kernel) -> int:
    match kernel:
        case Gemm(m=m, n=n, k=k):
            return kernel.flops + _FLOPS_PER_ELEMENT * (m * (n + k) + n * k)
        case Attention(num_heads=heads, num_key_value_heads=kv_heads, head_dim=width, seq_len=queries, num_keys=keys):
            elements = 2 * width * (heads * queries + kv_heads * (keys or queries))
            return kernel.flops + _FLOPS_PER_ELEMENT * elements
        case Pointwise(reads=reads, writes=writes):
            return _FLOPS_PER_ELEMENT * (reads + writes)
        case Lookup(rows=rows, width=columns):
            return _FLOPS_PER_ELEMENT * 2 * rows * columns
        case Exchange():
            return 0
