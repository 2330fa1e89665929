"""Step time and memory alone, by what a search uses: sooner than a whole prediction, and equal to it."""

from __future__ import annotations

from typing import NamedTuple

from simplan.scenario import Scenario

__all__ = ["Quick", "quick"]


class Quick(NamedTuple):
    """The two numbers.

    Attributes:
        step_time_s: Time of one optimizer step.
        device_bytes: Device memory of the rank that needs most.
    """

    step_time_s: float
    device_bytes: int


def quick(asked: Scenario) -> Quick | None:
    """The numbers of a plan; None where they need a calibration.

    Raises:
        SpecError: A price cannot be had.
    """
    from simplan.search.evaluate import evaluate  # brings numba

    if asked.job.cluster.cores_per_node is not None:
        return None
    device_bytes, step_time_s = evaluate(asked.job)
    assert step_time_s is not None, "there is no limit"
    return Quick(step_time_s, device_bytes)
