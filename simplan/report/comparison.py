"""A comparison in words: predicted beside measured, and whether the difference means anything."""

from __future__ import annotations

from simplan.report.table import format_table_text
from simplan.units import GIB, format_bytes, format_time
from simplan.validate.compare import Comparison, ComparisonRow

__all__ = ["comparison_text", "format_error", "format_spread"]


def comparison_text(comparison: Comparison) -> str:
    """The table, then what to know when reading it."""
    headers = ["", "predicted", "measured", "error", "spread", ""]
    rows = [
        [
            row.name,
            _value(row.predicted, row.unit),
            _value(row.measured, row.unit),
            format_error(row.signed_error),
            format_spread(row.spread),
            _reading(row),
        ]
        for row in comparison.rows
    ]
    interval = "lies in" if comparison.interval_holds else "lies outside of"
    actions = "exactly those predicted" if comparison.structure_equal else "NOT those predicted"
    notes = [
        f"the measured step time {interval} the predicted interval",
        f"actions, collectives and messages, and their order, are {actions}",
        f"unexplained, between actions: {format_time(comparison.unexplained_s)} of the step",
        "error = (predicted - measured) / measured; spread = half of p10 to p90 (of steps; for parts, of microbatches)",
        *comparison.notes,
    ]
    return format_table_text(headers, rows, indent=0) + "\n\n" + "\n".join(f"- {note}" for note in notes)


def format_error(signed_error: float | None) -> str:
    """A signed error in percent.

    >>> format_error(-0.0421), format_error(None)
    ('-4.2 %', '?')
    """
    return "?" if signed_error is None else f"{100 * signed_error:+.1f} %"


def format_spread(spread: float | None) -> str:
    """A relative spread; empty where nothing was repeated.

    >>> format_spread(0.031)
    '+/- 3.1 %'
    """
    return "" if spread is None else f"+/- {100 * spread:.1f} %"


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_time(value)
    if unit == "GiB":
        return format_bytes(value * GIB)
    return f"{value:.4g} {unit}".rstrip()


def _reading(row: ComparisonRow) -> str:
    return "within the spread" if row.within_spread else ""
