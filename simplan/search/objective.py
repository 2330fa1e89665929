"""Objectives of a search, as numbers to minimize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.prediction import training_run
from simplan.search.space import Objective, SearchSpace

# Each grows with the step time or does not depend on it, so its value at a lower bound of the time is a lower bound.
# For one batch, throughput per device is the inverse of device-seconds per step.
_VALUES: Mapping[Objective, Callable[[Any, Any, Any], Any]] = MappingProxyType(
    {
        "step_time": lambda num_devices, device_bytes, step_time_s: step_time_s,
        "tokens_per_s_per_device": lambda num_devices, device_bytes, step_time_s: step_time_s * num_devices,
        "num_devices": lambda num_devices, device_bytes, step_time_s: 1.0 * num_devices,
        "memory": lambda num_devices, device_bytes, step_time_s: 1.0 * device_bytes,
        "cost": lambda num_devices, device_bytes, step_time_s: step_time_s * num_devices,
    }
)


@dataclass(frozen=True, slots=True)
class Goal:
    """Objectives of a search, and the inputs to convert their values to reported units.

    Attributes:
        objectives: One objective, or the two of a Pareto front.
        tokens_per_step: Tokens per optimizer step; images for image models.
        dollars_per_device_hour, token_budget: As in ``SearchSpace``.
    """

    objectives: tuple[Objective, ...]
    tokens_per_step: int
    dollars_per_device_hour: float | None = None
    token_budget: float | None = None

    @classmethod
    def of(cls, space: SearchSpace, job: Job) -> Goal:
        """Make the goal that a space requests."""
        tokens = 1 if job.model.sample == "image" else job.model.seq_len
        tokens_per_step = job.training.global_batch_size * tokens
        return cls(space.goals, tokens_per_step, space.dollars_per_device_hour, space.token_budget)

    def values(self, num_devices: int, device_bytes: int, step_time_s: float) -> tuple[float, ...]:
        """Values to minimize, one per objective."""
        return tuple(_VALUES[name](num_devices, device_bytes, step_time_s) for name in self.objectives)

    def first_values(
        self, num_devices: NDArray[np.int64], device_bytes: NDArray[np.int64], step_time_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``(plans,)`` Values of the first objective."""
        return np.asarray(_VALUES[self.objectives[0]](num_devices, device_bytes, step_time_s))

    @property
    def follows_time(self) -> bool:
        """True if the first objective is proportional to the step time at a fixed number of devices."""
        return self.objectives[0] in ("step_time", "tokens_per_s_per_device", "cost")

    def tokens_per_s_per_device(self, num_devices: int, step_time_s: float) -> float:
        """Throughput per device, in tokens (or images) per second."""
        return self.tokens_per_step / step_time_s / num_devices

    def cost_dollars(self, num_devices: int, step_time_s: float) -> float | None:
        """Price in dollars of the steps that the token budget needs; None without a price or a budget."""
        if self.dollars_per_device_hour is None or self.token_budget is None:
            return None
        return training_run(
            self.token_budget,
            step_time_s,
            None,
            tokens_per_step=self.tokens_per_step,
            num_devices=num_devices,
            price_per_device_hour=self.dollars_per_device_hour,
        ).cost
