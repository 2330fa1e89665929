"""How sure step times are: spreads for which 90 % intervals hold as many of the runs that a fit has not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from fit.robust import Floats
from fit.rows import Prices, Row, Values
from simplan.program.program import LayerWork

__all__ = ["relative_stds", "unseen_std", "within"]

_INSIDE = 0.9
_NINE_IN_TEN = 1.645  # as of intervals of predictions
_POOLED_ROWS = 6  # rows of all others that every framework is taken to have beside its own
_LEAST, _MOST = 0.005, 2.0


def relative_stds(rows: Sequence[Row], values: Values, errors: Floats) -> dict[str, float]:
    """Relative standard deviation of prices of computation by software profile.

    Args:
        rows: All rows.
        values: Constants.
        errors: Logarithms of predicted over measured step times by fits that have not seen the row.
    """
    needed = _needed(rows, values, errors)
    by_software: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_software[row.job.software.id].append(index)
    pooled = np.quantile(needed, _INSIDE)
    found = {}
    for name, indices in sorted(by_software.items()):
        own = float(np.quantile(needed[indices], _INSIDE))
        found[name] = (len(indices) * own + _POOLED_ROWS * float(pooled)) / (len(indices) + _POOLED_ROWS)
    return found


def unseen_std(rows: Sequence[Row], values: Values, errors: Floats) -> float:
    """The same of all rows at once, each source counting alike.

    Args:
        rows: All rows.
        values: Constants.
        errors: By fits that have not seen the source.
    """
    needed = _needed(rows, values, errors)
    sources = [row.source for row in rows]
    weights = np.array([1 / sources.count(source) for source in sources])
    order = np.argsort(needed)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(needed[order][np.searchsorted(reached, _INSIDE)])


def within(rows: Sequence[Row], values: Values, errors: Floats, stds: Mapping[str, float]) -> Floats:
    """Whether measured step times are inside of 90 % intervals about predictions with such errors.

    Args:
        rows: The rows.
        values: Constants, for the parts of step times.
        errors: Of the predictions.
        stds: By software profile.
    """
    least = _needed(rows, values, errors)
    return np.array([need <= stds[row.job.software.id] for need, row in zip(least, rows, strict=True)], dtype=float)


def _needed(rows: Sequence[Row], values: Values, errors: Floats) -> Floats:
    """The least deviation of computation for which the interval about a prediction holds what was measured.

    The half width of an interval is 1.645 sqrt((s c)^2 + m^2), where c is what computation takes of the step and m the
    deviation of messages.
    """
    prices = Prices(values)
    needed = []
    for row, error in zip(rows, errors, strict=True):
        predicted_s = row.predicted_s(prices)
        work_s = sum(t.times * prices.seconds(row.job, t) for t in row.terms if isinstance(t.work, LayerWork))
        off = abs(1 - float(np.exp(-error))) / _NINE_IN_TEN  # of the prediction
        rest = max(0.0, off**2 - (row.message_deviation_s / predicted_s) ** 2) ** 0.5
        needed.append(min(_MOST, max(_LEAST, rest / (work_s / predicted_s))))
    return np.array(needed)
