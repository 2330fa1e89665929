"""Machines of published runs that are not like others with their devices, as their owners measured them.

What is here was timed kernel by kernel, as the rates of devices in the catalogue were; nothing is from a step time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from simplan.accuracy.schema import PublishedRun
from simplan.spec.hardware import DeviceSpec, Dtype
from simplan.units import format_flop_per_s

__all__ = ["on_its_machine"]


class _Machine(NamedTuple):
    """What a source published of its own machine.

    Attributes:
        repository: Which the runs are from.
        device: Id of its devices.
        matmul_flop_per_s: Best product that was timed there, by dtype (``DeviceSpec.matmul_flop_per_s``).
        source: Where that stands.
    """

    repository: str
    device: str
    matmul_flop_per_s: Mapping[Dtype, float]
    source: str


_MACHINES = (
    # the best of 514 products is 0.6551 of 2,250 TFLOP/s, those of 1e12 operations and more are 0.48 in the median
    _Machine(
        "MooreThreads/SimuMax",
        "b200-sxm",
        {"bf16": 1.474e15},
        "configs/system/b200_bf16_ceperm.json at 1b8ca90, accelerator.op.matmul",
    ),
)


def on_its_machine(device: DeviceSpec, run: PublishedRun, notes: list[str]) -> DeviceSpec:
    """The device as it is in the machine of a run.

    Args:
        device: The catalogue's.
        run: The run.
        notes: Gets what was changed.
    """
    for machine in _MACHINES:
        if run.source.startswith(f"{machine.repository}:") and device.id == machine.device:
            rates = ", ".join(f"{dtype} {format_flop_per_s(rate)}" for dtype, rate in machine.matmul_flop_per_s.items())
            notes.append(f"the best products of its machine, as its owners measured them: {rates} ({machine.source})")
            return device.model_copy(
                update={"matmul_flop_per_s": device.matmul_flop_per_s | dict(machine.matmul_flop_per_s)}
            )
    return device
