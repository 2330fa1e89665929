"""Whether a calibration is of the devices that are asked about."""

from __future__ import annotations

import re

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError

__all__ = ["refuse_other_device"]

_MEMORY_TOLERANCE = 0.15  # drivers report less than the label says


def refuse_other_device(calibration: Calibration, cluster: ClusterSpec) -> None:
    """A calibration prices the kind of device that it was taken on, and no other.

    The catalogue's ``h100-sxm-80gb`` is NVIDIA's ``H100 80GB HBM3``: the model is the first word of the one, and a word
    of the other; what has the same model and another memory is another device.

    Raises:
        SpecError: It was taken on something else.
    """
    device, timed_on = cluster.device, str(calibration.environment.get("device") or "an unnamed device")
    if cluster.cores_per_node is not None:
        alike = calibration.device_kind == "cpu"
    else:
        words = re.split(r"[^a-z0-9]+", timed_on.lower())
        alike = calibration.device_kind == device.kind and device.id.lower().split("-")[0] in words
        if alike and device.memory_bytes is not None:
            alike = abs(calibration.memory_bytes / device.memory_bytes - 1) <= _MEMORY_TOLERANCE
    if not alike:
        of_memory = f" of {calibration.memory_bytes / 2**30:.0f} GiB" if calibration.device_kind == "gpu" else ""
        rule = f"was measured on {timed_on}{of_memory}, which tells nothing about {device.id}"
        fix = f"run `simplan calibrate` on {device.id}, or leave the calibration out"
        raise SpecError(Problem(field="calibration", rule=rule, fix=fix))
