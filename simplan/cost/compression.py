"""Cost of the kernels of gradient compression, at the rate at which a device divides gradients."""

from __future__ import annotations

from simplan.cost.model import CostEstimate, CostModel, CostPart, Limit
from simplan.program.program import BucketWork
from simplan.units import counted, format_flops, format_time

_BYTES_PER_SCALED = 8  # read and written by the division of a gradient
_FLOPS_PER_BYTE = 10.0
"""FP32 FLOPs of a matmul with few columns in the time of one byte: 10 on an A100 (19.5 TFLOP/s, 2.0 TB/s), 20 on an
H100, 5 to 10 on a core of a CPU. Not fitted."""
_KERNEL_S = 5e-6
"""Seconds of a kernel besides its bytes: a launch of eager torch, on a GPU as on a CPU. Not fitted."""
_SELECTED_BYTES = 60.0
"""Bytes in whose time a GPU selects or permutes one element: a radix selection passes over values 4 times, with copies
of what is left. Not fitted."""
_SELECTED_ON_CPU_S = 15e-9
"""Seconds in which a core selects or permutes one element, whatever its memory: one core of a server (AMD EPYC, torch
2.13) took 9 to 22 ns for a selection, and 6 to 29 ns for a permutation. Not fitted."""
_RELATIVE_STD = 0.5


def bucket_cost(work: BucketWork, cost: CostModel, *, on_cpu: bool) -> CostEstimate:
    """Estimates memory-bound kernels, thin matmuls and selections from the time to divide gradients.

    Args:
        work: The kernels.
        cost: Gives the time of ``BucketWork.streamed``.
        on_cpu: True if they run on a CPU.
    """
    streamed = work.streamed
    estimate = cost.compute(streamed)
    byte_s = estimate.seconds / (_BYTES_PER_SCALED * max(1, streamed.num_parameters))
    multiplied_s = max(0.0, work.flops / _FLOPS_PER_BYTE * byte_s - estimate.seconds)
    selected_s = work.num_selected * (_SELECTED_ON_CPU_S if on_cpu else _SELECTED_BYTES * byte_s)
    kernels = work.num_kernels, _KERNEL_S
    parts = [
        *estimate.parts,
        CostPart("kernels", work.num_kernels * _KERNEL_S, Limit.LAUNCH, _kernels_words, kernels),
        CostPart("thin matmuls", multiplied_s, Limit.COMPUTE, _matmul_words, (work.flops, multiplied_s)),
        CostPart("selection", selected_s, Limit.MEMORY, _selection_words, (work.num_selected, selected_s)),
    ]
    found = tuple(part for part in parts if part.seconds)
    return CostEstimate(found, estimate.provenance, max(estimate.relative_std, _RELATIVE_STD))


def _kernels_words(number: int, kernel_s: float) -> str:
    return f"{counted(number, 'kernel')} x {format_time(kernel_s, digits=4)}"


def _matmul_words(flops: int, seconds: float) -> str:
    return f"{format_time(seconds, digits=4)} of {format_flops(flops)} beyond the bytes"


def _selection_words(number: int, seconds: float) -> str:
    return f"{format_time(seconds, digits=4)} for {number:,} elements"
