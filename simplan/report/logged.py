"""Prediction next to the values of a training log, as text: the error, and the terms that could explain it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from simplan.report.comparison import comparison_rows, signed_time
from simplan.report.table import format_table_text
from simplan.units import format_time
from simplan.validate.activity import ActivityShare
from simplan.validate.logged import LoggedComparison, UncertainTerm

__all__ = ["candidate_causes", "logged_text"]

_NAMED = 3
_ALL = 0.95  # fraction of the total uncertainty that the listed parts cover
_MOST_STDS = 3  # standard deviations of compute, or of communication, that may explain a difference
_LARGE = 0.05  # fraction of the step of a term that may be a candidate


def logged_text(comparison: LoggedComparison) -> str:
    """Table, verdict, the most uncertain parts, and notes."""
    low, high = (format_time(seconds) for seconds in comparison.interval_s)
    where = "lies in" if comparison.interval_holds else "lies outside of"
    notes = [
        "error = (predicted - measured) / measured; spread = half of p10 to p90 of the steps",
        "std: one standard deviation of the cost estimates; correlated for all compute, and for all communication",
        "hidden: communication that overlaps compute; part of it is exposed if it is slower than predicted",
        "alone: slowdown of this part alone that would explain the whole difference; a bound for communication that "
        "overlaps compute (<= or >=), whose hidden time changes as well",
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
    """One sentence: the most uncertain parts that could explain the difference; the largest parts if none could."""
    difference = f"the difference of {signed_time(comparison.difference_s)}"
    if comparison.rows[0].within_spread:
        return f"{difference} is within the spread of the steps: it is not significant"
    std_s = {  # errors of compute go together, and those of communication
        moves: sum(part.std_s for part in comparison.parts if _moves(part) is moves) for moves in (False, True)
    }
    likely = [p for p in comparison.parts if _MOST_STDS * std_s[_moves(p)] >= abs(comparison.difference_s)]
    if not likely:
        large = [part for part in comparison.parts if _size_s(part) >= _LARGE * comparison.rows[0].predicted]
        largest = sorted(large, key=_size_s, reverse=True)[:_NAMED]
        return (
            f"no term's uncertainty explains {difference}: it is more than {_MOST_STDS} standard deviations of compute "
            f"and of communication; candidates are the largest terms: {', '.join(map(_named, largest))}"
        )
    most_s = sum(part.std_s for part in likely)
    told_s = accumulate((part.std_s for part in likely), initial=0.0)
    named = [_named(part) for part, before_s in zip(likely[:_NAMED], told_s, strict=False) if before_s < _ALL * most_s]
    return f"{difference} could come from: {', '.join(named)}"


def _moves(part: UncertainTerm) -> bool:
    return part.share is ActivityShare.EXPOSED_COMMUNICATION


def _size_s(part: UncertainTerm) -> float:
    return part.predicted_s + part.hidden_s


def _named(part: UncertainTerm) -> str:
    hidden = f" and {format_time(part.hidden_s)} hidden" if part.hidden_s else ""
    return f"{part.part} ({format_time(part.predicted_s)} of the step{hidden}, +/- {100 * part.relative_std:.0f} %)"


def _parts(parts: tuple[UncertainTerm, ...]) -> str:
    headers = ["most uncertain first", "predicted", "hidden", "std", "", "alone"]
    return format_table_text(headers, [list(_cells(part)) for part in parts], indent=0)


def _cells(part: UncertainTerm) -> Iterator[str]:
    yield part.part
    yield format_time(part.predicted_s)
    yield format_time(part.hidden_s) if _moves(part) else ""
    yield f"+/- {100 * part.relative_std:.0f} %"
    yield f"+/- {format_time(part.std_s)}"
    yield _alone(part)


def _alone(part: UncertainTerm) -> str:
    """``x 1.20``; ``<= x 1.20`` for communication that overlaps compute, ``>= x 0.80`` where it would be faster."""
    times = part.times_as_long
    if times is None:
        return ""
    bound = ("<= " if times > 1 else ">= ") if part.hidden_s else ""
    return f"{bound}x {times:,.2f}" if bound or times < 100 else "x > 100"
