"""The robust fit against closed forms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fit.robust import Constant, Floats, minimize

X = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


def constants(log_std: float, low: float = 0.01, high: float = 100.0) -> list[Constant]:
    return [Constant(name, 1.0, log_std, low, high, range(len(X))) for name in ("a", "b")]


def fitted(seconds: Floats, log_std: float, **bounds: float) -> Floats:
    """Of seconds = a + b x."""

    def residuals(values: Floats, rows: Sequence[int]) -> Floats:
        x, measured = X[list(rows)], seconds[list(rows)]
        return np.asarray(np.log((values[0] + values[1] * x) / measured) / 0.01)

    values = minimize(constants(log_std, **bounds), residuals, np.ones(len(X)))
    return np.array([values["a"], values["b"]])


def test_exact_measurements_give_their_constants() -> None:
    assert fitted(3.0 + 0.5 * X, log_std=1e3) == pytest.approx([3.0, 0.5], rel=1e-6)


def test_an_outlier_counts_little() -> None:
    seconds = 3.0 + 0.5 * X
    seconds[2] /= 5
    robust = fitted(seconds, log_std=1e3)
    assert robust == pytest.approx([3.0, 0.5], rel=0.02)
    design = np.stack([np.ones_like(X), X], axis=1) / seconds[:, None]
    plain = np.linalg.lstsq(design, np.ones_like(X), rcond=None)[0]
    assert abs(plain[0] / 3.0 - 1) > 0.3


def test_without_measurements_that_tell_it_stays_at_the_textbook() -> None:
    """One constant of no row; the other's logarithm is pulled to its mean of textbook and measurement."""
    measured = np.log(np.array([4.0]))

    def residuals(values: Floats, rows: Sequence[int]) -> Floats:
        return np.asarray((np.log(values[:1]) - measured) / 1.0)[list(rows)]

    both = [Constant("known", 1.0, 1.0, 0.01, 100.0, [0]), Constant("unknown", 7.0, 1.0, 0.01, 100.0, [])]
    known, unknown = minimize(both, residuals, np.array([1.0])).values()
    assert unknown == pytest.approx(7.0)
    # d/dx of c**2 2 (sqrt(1 + (r/c)**2) - 1) + x**2 is zero, with r = x - log 4 and c = 1.5
    x = np.log(known)
    r = x - np.log(4.0)
    assert r / np.sqrt(1 + (r / 1.5) ** 2) + x == pytest.approx(0.0, abs=1e-6)


def test_bounds_hold() -> None:
    values = fitted(3.0 + 0.5 * X, log_std=1e3, low=0.6)
    assert values[1] == pytest.approx(0.6)
    assert constants(1.0, low=0.6)[1].at_bound(float(values[1]))
