"""Costs of kernels by the names of devices and frameworks, and rates for arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simplan import catalog
from simplan.cluster.hardware import DeviceSpec
from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.kernel_cost import kernel_cost
from simplan.cost.compute.kernels import KernelCost
from simplan.cost.compute.matmul import MatmulRates
from simplan.model.layer import Attention
from simplan.plan.plan import ParallelPlan
from simplan.software.rates import KernelRates
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training import TrainingSpec

PLAIN = KernelRates(
    kernel_overhead_s=0.0, tile_overhead_s=0.0, gemm_split_overhead_s=0.0, half_rate_k=0.0, tail_wave_fraction=1.0,
    unaligned_efficiency=1.0, odd_flop_per_s=1e18, misaligned_slice_efficiency=1.0, small_tile_efficiency=(1.0, 1.0),
    stream_overlap=1.0,
    half_rate_keys=0.0, head_dim_64_efficiency=1.0, softmax_traffic_factor=1.0, moe_std=0.0,
)  # fmt: skip
"""Of kernels that have no overhead."""


def changed(matmuls: MatmulRates, **rates: Any) -> MatmulRates:
    """Matmul rates with other efficiencies of the architecture."""
    return replace(matmuls, rates=matmuls.rates.model_copy(update=rates))


def cost_of(
    device: DeviceSpec | str,
    precision: Any = "bf16",
    software: SoftwareSpec | str = "torch",
    *,
    state: StateBytes | None = None,
    num_devices: int = 8,
    plan: ParallelPlan | None = None,
    **options: Any,
) -> KernelCost:
    """Costs for AdamW without sharded parameters; states are those of the framework unless given."""
    spec = catalog.software(software) if isinstance(software, str) else software
    device_spec = catalog.device(device) if isinstance(device, str) else device
    kept = state or spec.state(TrainingSpec(global_batch_size=8, precision=precision), plan or ParallelPlan())
    how = {"num_devices": num_devices, "shards_parameters": False, **options}
    return kernel_cost(device_spec, precision, kept, "adamw", spec, **how)


def attention_s(rates: AttentionRates, kernel: Attention, num_sequences: int, *, backward: bool) -> float:
    """Seconds of all kernels of attention."""
    return sum(part.seconds for part in rates.parts(kernel, num_sequences, backward=backward))
