"""Rows of a comparison: one quantity, predicted and measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FEWEST = 5  # minimum number of repeats for a spread


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One predicted and measured quantity.

    Attributes:
        name: Name of the quantity.
        predicted, measured: Values in ``unit``.
        unit: ``s``, ``GiB`` or ``updates``.
        signed_error: (predicted - measured) / measured; None if the measured value is 0.
        spread: Half the distance of the 10th and 90th percentile, relative to the median; None for fewer than five
            values. Values are the steps for the step time, and the microbatches and ranks of one step for its parts.
        within_spread: True if the error is at most the spread, so that it shows nothing; None if either is None.
    """

    name: str
    predicted: float
    measured: float
    unit: str
    signed_error: float | None
    spread: float | None
    within_spread: bool | None


def compared(name: str, predicted: float, measured: float, unit: str, spread: float | None) -> ComparisonRow:
    """Make the row of a quantity; see ``ComparisonRow``."""
    error = (predicted - measured) / measured if measured else None
    within = None if error is None or spread is None else abs(error) <= spread
    return ComparisonRow(name, predicted, measured, unit, error, spread, within)


def relative_spread(values: Sequence[float]) -> float | None:
    """Half the distance of the 10th and 90th percentile over the median; None for fewer than five values."""
    if len(values) < _FEWEST:
        return None
    ordered = sorted(values)
    tenth = int(0.1 * (len(ordered) - 1))
    return (ordered[-1 - tenth] - ordered[tenth]) / 2 / statistics.median(ordered)
