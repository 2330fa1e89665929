"""Robust, regularized, bounded least squares over a few positive constants, in numpy.

Minimizes sum_i w_i rho(r_i(x)) + sum_j ((x_j - x0_j) / s_j)**2 over x, the logarithms of the constants, where x0 are
textbook values and s how far, in logarithms, constants may be expected to be from them. rho is the soft L1 loss
2 c**2 (sqrt(1 + (r/c)**2) - 1), which counts an outlier linearly. Levenberg-Marquardt steps, each row weighted by
1 / sqrt(1 + (r/c)**2) (iteratively reweighted; Triggs et al. 2000, section 4.3), kept within bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Constant", "Residuals", "minimize"]

Floats = npt.NDArray[np.float64]
Residuals = Callable[[Floats, Sequence[int]], Floats]
"""From values of the constants to residuals of some rows, in standard deviations."""

_C = 1.5
_STEP = 1e-4
_MOST_ITERATIONS = 60
_LEAST_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Constant:
    """What is fitted.

    Attributes:
        name: E.g. ``nvlink3.latency_s``.
        textbook: Its value in books and datasheets, where the fit starts and is drawn to.
        log_std: How far from it the logarithm may be expected.
        low, high: Bounds.
        rows: Residuals that depend on it.
    """

    name: str
    textbook: float
    log_std: float
    low: float
    high: float
    rows: Sequence[int]

    def at_bound(self, value: float) -> bool:
        """Whether a value lies at a bound."""
        return bool(np.isclose(value, (self.low, self.high), rtol=1e-6).any())


def minimize(
    constants: Sequence[Constant],
    residuals: Residuals,
    weights: Floats,
    *,
    start: Mapping[str, float] | None = None,
    most_iterations: int = _MOST_ITERATIONS,
) -> Floats:
    """The values of the constants.

    Args:
        constants: What to fit.
        residuals: At given values, of given rows.
        weights: Of all rows.
        start: Values to start from, by name; those of books unless told otherwise.
        most_iterations: Steps after which it is good enough.
    """
    textbook = np.log([constant.textbook for constant in constants])
    inverse_variance = np.array([constant.log_std for constant in constants]) ** -2
    low, high = np.log([[constant.low, constant.high] for constant in constants]).T

    def cost(x: Floats, r: Floats) -> float:
        loss = 2 * _C**2 * (np.sqrt(1 + (r / _C) ** 2) - 1)
        return float(weights @ loss + inverse_variance @ (x - textbook) ** 2)

    begin = [(start or {}).get(constant.name, constant.textbook) for constant in constants]
    x, damping, rows = np.clip(np.log(begin), low, high), 1e-3, range(len(weights))
    r = residuals(np.exp(x), rows)
    best = cost(x, r)
    for _ in range(most_iterations):
        slopes = _slopes(constants, residuals, x, r)
        row_weights = weights / np.sqrt(1 + (r / _C) ** 2)
        matrix = slopes.T @ (slopes * row_weights[:, None]) + np.diag(inverse_variance)
        gradient = slopes.T @ (row_weights * r) + inverse_variance * (x - textbook)
        before = best
        while damping < 1e9:
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
            tried = np.clip(x - step, low, high)
            tried_r = residuals(np.exp(tried), rows)
            found = cost(tried, tried_r)
            if found < best:
                x, r, best, damping = tried, tried_r, found, max(damping / 10, 1e-9)
                break
            damping *= 10
        if before - best < _LEAST_GAIN * best:
            break
    return np.asarray(np.exp(x))


def _slopes(constants: Sequence[Constant], residuals: Residuals, x: Floats, r: Floats) -> Floats:
    """Derivatives of the residuals, by differences."""
    slopes = np.zeros((len(r), len(x)))
    for index, constant in enumerate(constants):
        moved = x.copy()
        moved[index] -= _STEP  # upper bounds may be limits of what is valid
        rows = list(constant.rows)
        slopes[rows, index] = (r[rows] - residuals(np.exp(moved), rows)) / _STEP
    return slopes
