"""Rates of kernels that have no overhead, and changes of rates, for arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simplan.cost.compute.matmul import MatmulRates
from simplan.software.rates import KernelRates

PLAIN = KernelRates(
    kernel_overhead_s=0.0, tile_overhead_s=0.0, gemm_split_overhead_s=0.0, half_rate_k=0.0, tail_wave_fraction=1.0,
    unaligned_efficiency=1.0, misaligned_slice_efficiency=1.0, small_tile_efficiency=(1.0, 1.0), stream_overlap=1.0,
    half_rate_keys=0.0, head_dim_64_efficiency=1.0, softmax_traffic_factor=1.0, moe_std=0.0,
)  # fmt: skip


def changed(matmuls: MatmulRates, **rates: Any) -> MatmulRates:
    """Matmul rates with other efficiencies of the architecture."""
    return replace(matmuls, rates=matmuls.rates.model_copy(update=rates))
