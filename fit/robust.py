"""Robust, regularized, bounded least squares over a few positive constants, in numpy.

Minimizes sum_i w_i rho(r_i(x)) + sum_j ((x_j - x0_j) / s_j)**2 over x, the logarithms of the constants. x0 are prior
values and s their prior standard deviations, both in logarithms. rho is the soft L1 loss
2 c**2 (sqrt(1 + (r/c)**2) - 1), which counts an outlier linearly. Levenberg-Marquardt steps weight each row by
1 / sqrt(1 + (r/c)**2) (iteratively reweighted; Triggs et al. 2000, section 4.3), and stay within bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Values = Mapping[str, float]
"""Constants by name, e.g. ``ampere.matmul_efficiency``, ``torchtitan.traffic``, ``nvlink3.latency_s``,
``tile_overhead_s``."""
Residuals = Callable[[Floats, Sequence[int]], Floats]
"""Function from constants and row indices to residuals of these rows, in standard deviations."""

_C = 1.5
_STEP = 1e-4
_MAX_ITERATIONS = 60
_MIN_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted constant.

    Attributes:
        textbook: Prior value, from datasheets and literature: the start of the fit, which is regularized toward it.
        log_std: Prior standard deviation of the logarithm.
        low, high: Bounds.
        rows: Indices of the residuals that depend on the constant.
    """

    name: str
    textbook: float
    log_std: float
    low: float
    high: float
    rows: Sequence[int]

    def at_bound(self, value: float) -> bool:
        """True if a value is at a bound."""
        return bool(np.isclose(value, (self.low, self.high), rtol=1e-6).any())


def constants_text(constants: Sequence[Constant], values: Values) -> Iterator[str]:
    """Yield the lines of a table of fitted constants."""
    yield f"{'constant':36}{'fitted':>10}{'textbook':>10}{'bounds':>18}{'rows':>6}"
    for constant in constants:
        value, bounds = values[constant.name], f"{constant.low:g} to {constant.high:g}"
        numbers = f"{value:10.4g}{constant.textbook:10.4g}{bounds:>18}{len(constant.rows):6}"
        yield f"{constant.name:36}{numbers}{'  at bound' if constant.at_bound(value) else ''}"


def number_text(value: float) -> str:
    """Format a number with four digits as YAML requires, with a decimal point."""
    text = f"{value:.4g}"
    return text if "e" not in text or "." in text else text.replace("e", ".0e")


def minimize(
    constants: Sequence[Constant],
    residuals: Residuals,
    weights: Floats,
    *,
    start: Values | None = None,
    most_iterations: int = _MAX_ITERATIONS,
    slopes_at_start: Floats | None = None,
) -> dict[str, float]:
    """Fit the constants; return their values by name.

    Args:
        constants: Constants to fit.
        residuals: Residuals of given rows at given values.
        weights: Weights of all rows.
        start: Start values; missing ones start at the prior.
        most_iterations: Maximum number of steps.
        slopes_at_start: ``(rows, constants)`` Derivatives of the residuals at the start, if known (``slopes``).
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
        derivatives = slopes(constants, residuals, x, r) if slopes_at_start is None else slopes_at_start
        slopes_at_start = None
        row_weights = weights / np.sqrt(1 + (r / _C) ** 2)
        matrix = derivatives.T @ (derivatives * row_weights[:, None]) + np.diag(inverse_variance)
        gradient = derivatives.T @ (row_weights * r) + inverse_variance * (x - textbook)
        before = best
        while damping < 1e9:
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
            tried = np.clip(x - step, low, high)
            tried_r = residuals(np.exp(tried), rows)
            tried_cost = cost(tried, tried_r)
            if tried_cost < best:
                x, r, best, damping = tried, tried_r, tried_cost, max(damping / 10, 1e-9)
                break
            damping *= 10
        if before - best < _MIN_GAIN * best:
            break
    return dict(zip([constant.name for constant in constants], np.exp(x).tolist(), strict=True))


def slopes(constants: Sequence[Constant], residuals: Residuals, x: Floats, r: Floats) -> Floats:
    """``(rows, constants)`` Derivatives of the residuals r at the logarithms x of the constants, by differences."""
    jacobian = np.zeros((len(r), len(x)))
    for index, constant in enumerate(constants):
        moved = x.copy()
        moved[index] -= _STEP  # downward, since upper bounds may be limits of validity
        rows = list(constant.rows)
        jacobian[rows, index] = (r[rows] - residuals(np.exp(moved), rows)) / _STEP
    return jacobian
