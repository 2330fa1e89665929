"""Steady steps of a log: which steps count, and which are left out as warm-up or as interrupted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARMUP_RATIO = 1.1
"""Smallest slowdown of a warm-up step, relative to the median of the later half of the run."""
OUTLIER_RATIO = 1.5
"""Slowdown from which a single step is left out: it saved a checkpoint, evaluated, or waited for something else."""
_MAX_DEVIATIONS = 5.0  # median absolute deviations that steady steps may lie above the median
_WARMUP_STEPS = 10  # the warm-up ends within these steps, or within a tenth of a longer run
_MAX_OUTLIERS = 0.2  # fraction of the steps: more of them are how the job runs


@dataclass(frozen=True, slots=True)
class SteadySteps:
    """Choice of the steps of a run that a step time is taken from.

    Attributes:
        num_warmup: Initial steps that are left out.
        outliers: Indices of later steps that are left out.
        indices: Indices of the steps that count, at least one.
        limit_s: Time from which a step of the warm-up counts as slow, in seconds.
    """

    num_warmup: int
    outliers: tuple[int, ...]
    indices: tuple[int, ...]
    limit_s: float


def steady_steps(times_s: Sequence[float]) -> SteadySteps:
    """Choose the steady steps of a run.

    The reference is the later half of the run. A step is slow if it takes 1.1 times the median of the reference, and
    more than five median absolute deviations above it. The warm-up ends after the last slow step among the first ten,
    or the first tenth of a longer run, but never beyond the first half. Of the remaining steps, those that differ from
    their median by a factor of more than 1.5 are left out, unless they are more than a fifth.

    >>> steady_steps([20.0, 2.0, 5.0, 2.0, 2.1, 2.0, 3.5, 2.0, 2.1, 2.0]).indices
    (3, 4, 5, 7, 8, 9)

    Args:
        times_s: Times of consecutive steps in seconds, at least one.
    """
    number = len(times_s)
    later = times_s[number // 2 :]
    median_s = statistics.median(later)
    deviation_s = statistics.median(abs(time_s - median_s) for time_s in later)
    limit_s = max(WARMUP_RATIO * median_s, median_s + _MAX_DEVIATIONS * deviation_s)
    window = min(number // 2, max(_WARMUP_STEPS, number // 10))
    num_warmup = max((index + 1 for index in range(window) if times_s[index] > limit_s), default=0)
    rest = range(num_warmup, number)
    median_s = statistics.median(times_s[index] for index in rest)
    outliers = [i for i in rest if not median_s / OUTLIER_RATIO <= times_s[i] <= median_s * OUTLIER_RATIO]
    if len(outliers) > _MAX_OUTLIERS * len(rest):
        outliers = []
    return SteadySteps(num_warmup, tuple(outliers), tuple(i for i in rest if i not in {*outliers}), limit_s)
