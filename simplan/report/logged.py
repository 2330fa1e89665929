"""Prediction next to the values of a training log, as text: the error, and the terms that could explain it."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.report.comparison import comparison_rows, signed_time
from simplan.report.table import format_table_text
from simplan.units import format_time
from simplan.validate.activity import ActivityShare
from simplan.validate.logged import LoggedComparison, UncertainTerm

__all__ = ["candidate_causes", "logged_text"]

_NAMED = 3
_ALL = 0.95  # fraction of the total uncertainty that the listed parts cover


def logged_text(comparison: LoggedComparison) -> str:
    """Table, verdict, the most uncertain parts, and notes."""
    low, high = (format_time(seconds) for seconds in comparison.interval_s)
    where = "lies in" if comparison.interval_holds else "lies outside of"
    notes = [
        "error = (predicted - measured) / measured; spread = half of p10 to p90 of the steps",
        "std: one standard deviation of the cost estimates; correlated for all compute, and for all communication",
        "hidden: communication that overlaps compute; part of it is exposed if it is slower than predicted",
        "alone: slowdown of this part alone that would explain the whole difference",
        *comparison.notes,
    ]
    return "\n\n".join(
        (
            comparison_rows(comparison.rows),
            f"the measured step time {where} the predicted 90 % interval, {low} to {high}\n"
            f"{candidate_causes(comparison)}",
            _parts(comparison.parts),
            "\n".join(f"- {note}" for note in notes),
        )
    )


def candidate_causes(comparison: LoggedComparison) -> str:
    """Most uncertain parts, with their uncertainty, in one sentence."""
    most_s = sum(part.std_s for part in comparison.parts)
    named: list[str] = []
    told_s = 0.0
    for part in comparison.parts[:_NAMED]:
        if told_s < _ALL * most_s:
            share = f"{format_time(part.predicted_s)} of the step, +/- {100 * part.relative_std:.0f} %"
            named.append(f"{part.part} ({share})")
        told_s += part.std_s
    difference = f"the difference of {signed_time(comparison.difference_s)}"
    if comparison.rows[0].within_spread:
        return f"{difference} is within the spread of the steps: it is not significant"
    return f"{difference} could come from: {', '.join(named)}"


def _parts(parts: tuple[UncertainTerm, ...]) -> str:
    headers = ["most uncertain first", "predicted", "hidden", "std", "", "alone"]
    return format_table_text(headers, [list(_cells(part)) for part in parts], indent=0)


def _cells(part: UncertainTerm) -> Iterator[str]:
    yield part.part
    yield format_time(part.predicted_s)
    yield format_time(part.hidden_s) if part.share is ActivityShare.EXPOSED_COMMUNICATION else ""
    yield f"+/- {100 * part.relative_std:.0f} %"
    yield f"+/- {format_time(part.std_s)}"
    yield "" if part.times_as_long is None else f"x {part.times_as_long:.2f}" if part.times_as_long < 100 else "x > 100"
