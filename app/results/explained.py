"""A plan taken apart; a task for another process."""

from __future__ import annotations

from functools import lru_cache

from simplan.cost.store import default_path, load
from simplan.explain import Explanation, explain
from simplan.predict import predict
from simplan.scenario import parse_scenario

__all__ = ["explained"]


@lru_cache(maxsize=8)
def explained(text: str, calibrated_at: int) -> Explanation:
    """Takes the plan of a scenario apart.

    Args:
        text: The scenario's YAML.
        calibrated_at: When this machine's calibration was written, for caches.

    Raises:
        SpecError: As ``predict``.
    """
    asked = parse_scenario(text)
    calibration = load(default_path()) if asked.job.cluster.cores_per_node is not None else None
    return explain(predict(asked.job, name=asked.name, calibration=calibration), calibration)
