"""Fitted constants of ``simplan.software.rates``: expected spread of the logarithm and bounds of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from simplan.software.rates import AttentionKernel


class ParameterBounds(NamedTuple):
    """Prior spread and bounds of a constant.

    Attributes:
        log_std: Prior standard deviation of the logarithm about the prior value.
        low, high: Bounds of the constant.
    """

    log_std: float
    low: float
    high: float


_LINE_RATE = 0.92
"""Least slowdown of communication: networks are timed at 0.91 of their line rate, which no training exceeds."""

ARCHITECTURE: Mapping[str, ParameterBounds] = {
    "matmul_efficiency": ParameterBounds(0.1, 0.4, 1.0),
    "fp8_efficiency": ParameterBounds(0.3, 0.3, 1.0),
    "fp4_efficiency": ParameterBounds(0.4, 0.2, 1.0),
    "bandwidth_efficiency": ParameterBounds(0.1, 0.5, 1.0),
}
"""Constants per architecture, in addition to its attention kernels (data has at most two per architecture)."""

KERNELS: tuple[AttentionKernel, ...] = ("flash1", "flash2", "flash3")
SUSTAINED = ParameterBounds(0.2, 0.3, 2.0)
"""Constant per attention kernel and architecture: ``AttentionEfficiency.sustained``."""

SOFTWARE: Mapping[str, ParameterBounds] = {
    "traffic": ParameterBounds(0.5, 0.3, 4.0),
    "compiled_traffic": ParameterBounds(0.5, 0.2, 4.0),
    "framework_efficiency": ParameterBounds(0.07, 0.7, 1.3),
    "intra_slowdown": ParameterBounds(0.3, _LINE_RATE, 3.0),
    "inter_slowdown": ParameterBounds(0.5, _LINE_RATE, 4.0),
}
"""Constants per software profile."""

NEVER_APART = ("maxtext", "tpu-v5")
TOGETHER = 0.3
"""Narrower prior for owners whose names begin with ``NEVER_APART``, as a factor of ``log_std``.

All TPU data is from MaxText and all MaxText data from TPUs, fourteen runs. With the usual priors, fits follow
peculiarities of these runs, and held-out errors grow by a third.
"""

ALL: Mapping[str, ParameterBounds] = {
    "tile_overhead_s": ParameterBounds(0.05, 0.1e-6, 20e-6),  # GEMMs timed alone leave little room
    "half_rate_keys": ParameterBounds(0.5, 30.0, 2000.0),
    "head_dim_64_efficiency": ParameterBounds(0.1, 0.4, 1.0),
    "misaligned_slice_efficiency": ParameterBounds(0.3, 0.02, 1.0),
    "transpose_bytes_per_s": ParameterBounds(0.5, 2e9, 50e9),
    "tail_wave_fraction": ParameterBounds(0.5, 0.05, 1.0),
    "softmax_traffic_factor": ParameterBounds(0.3, 0.7, 3.0),
    "rowwise_efficiency": ParameterBounds(0.15, 0.4, 1.0),
    "jitter": ParameterBounds(0.7, 0.001, 0.05),
    "kernel_overhead_s": ParameterBounds(0.5, 1e-6, 30e-6),
    "overlap_slowdown": ParameterBounds(0.5, 0.01, 0.5),
    "gemm_split_overhead_s": ParameterBounds(0.7, 1e-6, 300e-6),
    "host_call_s": ParameterBounds(0.7, 1e-6, 60e-6),
    "host_step_overhead_s": ParameterBounds(0.7, 1e-3, 0.1),
    "host_batch_overhead_s": ParameterBounds(0.7, 0.05e-3, 5e-3),
}
"""Constants common to all devices and frameworks."""
