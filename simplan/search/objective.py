"""What makes one plan better than another, as numbers to make small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.search.space import Objective, SearchSpace

__all__ = ["Goal"]

_HOUR_S = 3600.0

# Each grows with the step time, or does not depend on it: so the value at a lower bound of the time is a lower bound
# of the value. Throughput per device is the inverse of device-seconds a step, for one batch.
_VALUES: Mapping[Objective, Callable[[int, int, float], float]] = MappingProxyType(
    {
        "step_time": lambda num_devices, device_bytes, step_time_s: step_time_s,
        "tokens_per_s_per_device": lambda num_devices, device_bytes, step_time_s: step_time_s * num_devices,
        "num_devices": lambda num_devices, device_bytes, step_time_s: float(num_devices),
        "memory": lambda num_devices, device_bytes, step_time_s: float(device_bytes),
        "cost": lambda num_devices, device_bytes, step_time_s: step_time_s * num_devices,
    }
)


@dataclass(frozen=True, slots=True)
class Goal:
    """The objectives of a search, and what turns their values into what people read.

    Attributes:
        objectives: One, or the two of a front.
        tokens_per_step: Tokens (images, for models of images) of one optimizer step.
        dollars_per_device_hour, token_budget: As in ``SearchSpace``.
    """

    objectives: tuple[Objective, ...]
    tokens_per_step: int
    dollars_per_device_hour: float | None = None
    token_budget: float | None = None

    @classmethod
    def of(cls, space: SearchSpace, job: Job) -> Goal:
        """What a space asks for."""
        tokens = 1 if job.model.sample == "image" else job.model.seq_len
        return cls(
            space.goals,
            job.training.global_batch_size * tokens,
            space.dollars_per_device_hour,
            space.token_budget,
        )

    def values(self, num_devices: int, device_bytes: int, step_time_s: float) -> tuple[float, ...]:
        """What to make small, a number for each objective."""
        return tuple(_VALUES[name](num_devices, device_bytes, step_time_s) for name in self.objectives)

    def first_values(
        self, num_devices: NDArray[np.int64], device_bytes: NDArray[np.int64], step_time_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``(plans,)`` Values of the first objective."""
        match self.objectives[0]:
            case "step_time":
                return step_time_s
            case "num_devices":
                return num_devices.astype(np.float64)
            case "memory":
                return device_bytes.astype(np.float64)
            case _:
                return np.asarray(step_time_s * num_devices)

    @property
    def follows_time(self) -> bool:
        """Whether the first objective is the step time, or in proportion to it on as many devices."""
        return self.objectives[0] in ("step_time", "tokens_per_s_per_device", "cost")

    def tokens_per_s_per_device(self, num_devices: int, step_time_s: float) -> float:
        """Throughput."""
        return self.tokens_per_step / step_time_s / num_devices

    def cost_dollars(self, num_devices: int, step_time_s: float) -> float | None:
        """Price of the token budget: its steps, times devices, times the user's price; None without a price."""
        if self.dollars_per_device_hour is None or self.token_budget is None:
            return None
        steps = self.token_budget / self.tokens_per_step
        return steps * step_time_s / _HOUR_S * num_devices * self.dollars_per_device_hour
