"""Step time and memory as a search computes them: faster than a full prediction, and equal to it."""

from __future__ import annotations

from typing import NamedTuple

from simplan.scenario import Scenario

__all__ = ["PlanEstimate", "quick"]


class PlanEstimate(NamedTuple):
    """Step time and memory of a plan.

    Attributes:
        step_time_s: Time of one optimizer step in seconds.
        device_bytes: Device memory of the peak-memory rank.
    """

    step_time_s: float
    device_bytes: int


def quick(asked: Scenario) -> PlanEstimate | None:
    """Step time and memory of a plan, as a search computes them; None for ranks that share CPU cores.

    Raises:
        SpecError: The cost model has no estimate for the plan.
    """
    from simplan.predict.step_summary import evaluate_step  # brings numba

    if asked.job.cluster.cores_per_node is not None:
        return None
    device_bytes, step_time_s = evaluate_step(asked.job)
    assert step_time_s is not None, "there is no limit"
    return PlanEstimate(step_time_s, device_bytes)
