"""Where the steady state of a run begins, by its step times alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["LEAST_STEADY", "steady_from"]

LEAST_STEADY = 5
"""Steps that always count, the last ones."""


def steady_from(times_s: Sequence[float]) -> int:
    """Index of the first steady step.

    MSER (White 1997, "An effective truncation heuristic for bias reduction in simulation output"): steps are left out
    from the beginning as long as that makes the standard error of the mean of the others smaller, at most the first
    half. Only a first part is left out: a slow step in the middle is a slow step.

    Args:
        times_s: Of all steps, in order.
    """
    times = np.asarray(times_s)
    most = max(0, min(len(times) // 2, len(times) - LEAST_STEADY))
    if not most:
        return 0
    return int(np.argmin([times[begin:].var() / (len(times) - begin) for begin in range(most + 1)]))
