"""Costs of kernels by the names of devices and frameworks."""

from __future__ import annotations

from typing import Any

from simplan import catalog
from simplan.cluster.hardware import DeviceSpec
from simplan.cost.compute.kernel_cost import kernel_cost
from simplan.cost.compute.kernels import KernelCost
from simplan.plan.plan import ParallelPlan
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training.training import TrainingSpec

__all__ = ["cost_of"]


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
    found = catalog.device(device) if isinstance(device, str) else device
    kept = state or spec.state(TrainingSpec(global_batch_size=8, precision=precision), plan or ParallelPlan())
    how = {"num_devices": num_devices, "shards_parameters": False, **options}
    return kernel_cost(found, precision, kept, "adamw", spec, **how)
