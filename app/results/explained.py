"""A plan taken apart; a task for another process."""

from __future__ import annotations

from functools import lru_cache

from app.results.plan import predicted_step
from simplan.explain import Explanation, explain

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
    return explain(*predicted_step(text, calibrated_at))
