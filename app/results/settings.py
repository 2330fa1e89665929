"""Importance of a plan's settings: the effect of every other valid value of one setting at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from app.fitting import changed, degrees_of, microbatch_sizes, valid_values
from app.state import document_text
from simplan.document import parse_yaml
from simplan.plan.plan import Recompute
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict.step_summary import evaluate_step
from simplan.scenario import parse_scenario

_DEGREES = ("tp", "cp", "pp", "ep", "dp_replicate")
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "schedule": tuple(SCHEDULE_FACTS),
    "recompute": get_args(Recompute),
    "grad_sync": ("step", "microbatch"),
    "sequence_parallel": (False, True),
    "reshard_after_forward": (False, True),
    "offload_optimizer": (False, True),
    "offload_activations": (False, True),
}


@dataclass(frozen=True, slots=True)
class SettingEffect:
    """Step time and memory of a plan with another value of one setting; data parallelism follows the devices.

    Attributes:
        key: Key of the plan.
        value: The other value.
        step_time_s: Step time in seconds.
        step_time_change: Relative change of the step time.
        device_bytes: Device memory of the peak-memory rank, in bytes.
        fits: True when the memory is within the capacity; None when the capacity is unknown.
    """

    key: str
    value: Any
    step_time_s: float
    step_time_change: float
    device_bytes: int
    fits: bool | None


def setting_effects(text: str) -> tuple[SettingEffect, ...]:
    """Effect of every other valid value of each setting, by the cost model of a search; calibrated costs have none.

    Args:
        text: The scenario's YAML.
    """
    document = parse_yaml(text, "scenario").data
    job = parse_scenario(text).job
    if job.cluster.cores_per_node is not None:
        return ()
    _, base_s = evaluate_step(job)
    assert base_s is not None, "there is no limit"
    capacity = job.cluster.largest_memory_bytes
    values = {key: degrees_of(document, key) for key in _DEGREES}
    values["microbatch_size"] = microbatch_sizes(document)
    values |= {key: valid_values(document, key, options) for key, options in _OPTIONS.items()}
    if job.plan.pp == 1:
        del values["schedule"]
    found = []
    for key, others in values.items():
        for value in others:
            other = parse_scenario(document_text(changed(document, key, value))).job
            if value == getattr(job.plan, key) or other.plan == job.plan:
                continue
            device_bytes, step_time_s = evaluate_step(other)
            assert step_time_s is not None, "there is no limit"
            fits = None if capacity is None else device_bytes <= capacity
            found.append(SettingEffect(key, value, step_time_s, step_time_s / base_s - 1, device_bytes, fits))
    return tuple(found)
