"""Best checkpoint interval: that of Young and of Daly, and by the mean time of the run with equal failures at each.

Between the grid's points the mean time is fitted by a + b / interval + c interval, the form of Young's model, whose
minimum is sqrt(b / c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from simplan.goodput.engines.simulate import simulate
from simplan.goodput.rates import mtbf_s
from simplan.goodput.setup import RunSetup

_POINTS_PER_OCTAVE = 2
_OCTAVES = 3
"""Octaves of the grid on each side of its center."""
_MAX_SHIFTS = 4
_FITTED_OCTAVES = 1.5
"""Octaves on each side of the best point of the grid that are fitted."""
_NUM_FITTED = 3
"""Parameters of the fit."""


def young_s(blocking_s: float, mtbf_s: float) -> float:
    """Best interval of work between checkpoints, first order: sqrt(2 blocking M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974. It holds while the interval is far below ``mtbf_s``.
    """
    return math.sqrt(2 * blocking_s * mtbf_s)


def daly_s(blocking_s: float, mtbf_s: float) -> float:
    """Best interval of work between checkpoints, higher order; the mean time itself for checkpoints of twice that.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    half = blocking_s / (2 * mtbf_s)
    return young_s(blocking_s, mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - blocking_s


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPoint:
    """Mean time of the run at one checkpoint interval.

    Attributes:
        every_steps: Steps between two checkpoints.
        interval_s: Seconds of training between them.
        time_s: Mean time of the run.
    """

    every_steps: int
    interval_s: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCurve:
    """Checkpoint intervals and the mean time of the run.

    Attributes:
        best: Point with the shortest mean time.
        young_s, daly_s: Young's and Daly's optimum for the rate of unplanned failures.
        points: Simulated points, shortest interval first.
        num_runs: Simulated runs of each point, with the same failures.
    """

    best: IntervalPoint
    young_s: float
    daly_s: float
    points: tuple[IntervalPoint, ...]
    num_runs: int


def interval_curve(setup: RunSetup, *, num_runs: int, seed: int = 0, jobs: int = 1) -> IntervalCurve | None:
    """Mean time over the checkpoint interval; None without checkpoints or unplanned failures.

    Args:
        setup: Run with any checkpoint interval.
        num_runs, seed, jobs: See ``simulate``.
    """
    failures_s = mtbf_s(setup)
    if not setup.checkpoint_every or math.isinf(failures_s):
        return None
    times: dict[int, float] = {}

    def time_at(every: int) -> float:
        if every not in times:
            runs = simulate(replace(setup, checkpoint_every=every), num_runs=num_runs, seed=seed, jobs=jobs)
            times[every] = float(runs.time_s.mean())
        return times[every]

    young = young_s(setup.blocking_s, failures_s)
    center = max(1.0, young / setup.step_s)
    grid: list[int] = []
    for _ in range(_MAX_SHIFTS):
        grid = _grid(center, setup.num_steps)
        best = min(grid, key=time_at)
        if grid[0] < best < grid[-1] or best in (1, setup.num_steps):
            break
        center = float(best)
    best = _fitted(min(times, key=times.__getitem__), times)
    time_at(best)
    points = {
        every: IntervalPoint(every_steps=every, interval_s=every * setup.step_s, time_s=times[every])
        for every in sorted(times)
    }
    daly = daly_s(setup.blocking_s, failures_s)
    return IntervalCurve(
        best=points[best], young_s=young, daly_s=daly, points=tuple(points.values()), num_runs=num_runs
    )


def _grid(center: float, num_steps: int) -> list[int]:
    """Steps between checkpoints around a center, ascending."""
    number = _OCTAVES * _POINTS_PER_OCTAVE
    factors = (2.0 ** (half_octave / _POINTS_PER_OCTAVE) for half_octave in range(-number, number + 1))
    return sorted({min(max(round(center * factor), 1), num_steps) for factor in factors})


def _fitted(best: int, times: dict[int, float]) -> int:
    """Steps at the minimum of a + b / x + c x through the points near the best one; that one if there is no minimum."""
    near = [steps for steps in times if abs(math.log2(steps / best)) <= _FITTED_OCTAVES]
    if len(near) <= _NUM_FITTED:
        return best
    x = np.asarray(near, dtype=float)
    basis = np.stack([np.ones_like(x), 1 / x, x], axis=1)
    _, inverse, linear = np.linalg.lstsq(basis, np.asarray([times[steps] for steps in near]), rcond=None)[0]
    if inverse <= 0 or linear <= 0:
        return best
    return min(max(round(math.sqrt(inverse / linear)), min(near)), max(near))
