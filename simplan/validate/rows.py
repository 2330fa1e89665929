"""One quantity, predicted beside measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ComparisonRow", "compared", "relative_spread"]

_FEWEST = 5  # repeats that have a spread


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One quantity.

    Attributes:
        name: What it is.
        predicted, measured: In ``unit``.
        unit: ``s`` or ``GiB``.
        signed_error: (predicted - measured) / measured; None when the measured value is 0.
        spread: Half the distance of the 10th and 90th percentile, relative: of the steps for the step time, of the
            microbatches and ranks of one step for its parts; None for fewer than five.
        within_spread: Whether the error is no larger than the spread, so that nothing can be read off it.
    """

    name: str
    predicted: float
    measured: float
    unit: str
    signed_error: float | None
    spread: float | None
    within_spread: bool | None


def compared(name: str, predicted: float, measured: float, unit: str, spread: float | None) -> ComparisonRow:
    """The row of a quantity; see ``ComparisonRow``."""
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
