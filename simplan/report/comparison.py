"""Comparison report as text: predicted next to measured values, and the significance of the difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simplan.report.table import format_table_text
from simplan.units import GIB, format_bytes, format_time
from simplan.validate.activity import ActivityShare
from simplan.validate.compare import Comparison
from simplan.validate.rows import ComparisonRow

__all__ = ["comparison_rows", "comparison_text", "format_error", "format_spread", "signed_time"]

_MAX_RANKS = 8


def comparison_text(comparison: Comparison) -> str:
    """Table of the comparison, followed by notes."""
    interval = "lies in" if comparison.interval_holds else "lies outside of"
    actions = "exactly those predicted" if comparison.structure_equal else "NOT those predicted"
    speed = f"a matmul took {comparison.slowdown or 0:.2f} times as long in the run as when it was calibrated"
    notes = [
        f"the measured step time {interval} the predicted interval",
        f"actions, collectives and P2P sends, and their order, are {actions}",
        f"unexplained on the measured critical path: {format_time(comparison.unexplained_s)} without a known cause",
        *([] if comparison.slowdown is None else [speed]),
        "error = (predicted - measured) / measured; spread = half of p10 to p90 (of steps; for parts, of microbatches)",
        *comparison.notes,
    ]
    parts = [comparison_rows(comparison.rows), *_terms(comparison), *_splits(comparison)]
    return "\n\n".join((*parts, "\n".join(f"- {note}" for note in notes)))


def comparison_rows(rows: Sequence[ComparisonRow]) -> str:
    """One quantity a line."""
    headers = ["", "predicted", "measured", "error", "spread", ""]
    cells = [
        [
            row.name,
            _value(row.predicted, row.unit),
            _value(row.measured, row.unit),
            format_error(row.signed_error),
            format_spread(row.spread),
            "within the spread" if row.within_spread else "",
        ]
        for row in rows
    ]
    return format_table_text(headers, cells, indent=0)


def format_error(signed_error: float | None, unknown: str = "?") -> str:
    """A signed error in percent, or the text for an unknown one.

    >>> format_error(-0.0421), format_error(None)
    ('-4.2 %', '?')
    """
    return unknown if signed_error is None else f"{100 * signed_error:+.1f} %"


def format_spread(spread: float | None) -> str:
    """A relative spread; empty if unknown.

    >>> format_spread(0.031)
    '+/- 3.1 %'
    """
    return "" if spread is None else f"+/- {100 * spread:.1f} %"


def _terms(comparison: Comparison) -> Iterator[str]:
    """The critical paths, term by term, and their sum."""
    terms = comparison.terms
    if not terms:
        return
    step = comparison.rows[0]
    rows = [
        [term.part, format_time(term.predicted_s), format_time(term.measured_s), signed_time(term.difference_s)]
        for term in terms
        if term.predicted_s or term.measured_s
    ]
    difference_s = step.predicted - step.measured
    rows.append(["step time", format_time(step.predicted), format_time(step.measured), signed_time(difference_s)])
    most, whole = signed_time(terms[0].difference_s), signed_time(difference_s)
    carries = f"most of the difference: {terms[0].part} ({most} of {whole})"
    headers = ["on the critical path", "predicted", "measured", "difference"]
    yield f"{format_table_text(headers, rows, indent=0)}\n{carries}"


def _splits(comparison: Comparison) -> Iterator[str]:
    """Step breakdown of every rank, predicted over measured, without shares that are zero on all ranks."""
    if not comparison.splits:
        return
    splits = comparison.splits
    shares = [
        share for share in ActivityShare if any(one.predicted_s[share] or one.measured_s[share] for one in splits)
    ]
    rows = []
    for split in splits[:_MAX_RANKS]:
        rows.append([f"{split.rank}", "predicted", *(format_time(split.predicted_s[share]) for share in shares)])
        rows.append(["", "measured", *(format_time(split.measured_s[share]) for share in shares)])
    headers = ["rank", "", *(share.replace("_", " ") for share in shares)]
    hidden = len(splits) - _MAX_RANKS
    more = f"\nand {hidden} more ranks (--json has all)" if hidden > 0 else ""
    yield format_table_text(headers, rows, indent=0, left=2) + more


def signed_time(seconds: float) -> str:
    """A difference of times.

    >>> signed_time(-0.0123)
    '-12.3 ms'
    """
    return f"{'-' if seconds < 0 else '+'}{format_time(abs(seconds))}"


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_time(value)
    if unit == "GiB":
        return format_bytes(value * GIB)
    return f"{value:.4g} {unit}".rstrip()
