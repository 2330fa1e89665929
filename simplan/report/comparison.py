"""Comparisons as text: predicted next to measured, logged or rehearsed values, and the significance of differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from simplan.documentation import documentation
from simplan.report.table import format_table_text
from simplan.report.text import split_parts
from simplan.units import GIB, format_bytes, format_percent, format_time
from simplan.validate.activity import ActivityShare
from simplan.validate.attribution import TermDifference
from simplan.validate.compare import Comparison
from simplan.validate.goodput import GoodputComparison
from simplan.validate.logged import LoggedComparison, UncertainTerm
from simplan.validate.logged_memory import MemoryTerm
from simplan.validate.losses import LossCurve
from simplan.validate.rehearsal import MemoryRow, RehearsalComparison, Rehearsed
from simplan.validate.rows import ComparisonRow

_MAX_RANKS = 8
_HALF = 0.5
_LOSS_ROWS = 8
_NO_DIFFERENCE = 0.0005  # relative; shown as 0.0 %


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
        *([] if comparison.interval_holds else [_SLOW]),
        *_loss_notes(comparison),
    ]
    parts = [comparison_rows(comparison.rows), *_terms(comparison), *_splits(comparison), *_losses(comparison)]
    parts += [] if comparison.goodput is None else [_goodput(comparison.goodput)]
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
    headers = ["on the critical path", "predicted", "measured", "difference"]
    yield "\n".join((format_table_text(headers, rows, indent=0), *_largest_term(terms[0], difference_s)))


def _largest_term(largest: TermDifference, difference_s: float) -> Iterator[str]:
    """The term with the largest difference; "most of the difference" if it is more than half and not more than all."""
    if not largest.difference_s:
        return
    share = largest.difference_s / difference_s if difference_s else 0.0
    words = "most of the difference" if _HALF < share <= 1 else "largest term"
    yield f"{words}: {largest.part} ({signed_time(largest.difference_s)} of {signed_time(difference_s)})"


def _splits(comparison: Comparison) -> Iterator[str]:
    """Step breakdown of every rank, predicted over measured, without shares that are zero on all ranks."""
    if not comparison.splits:
        return
    splits = comparison.splits
    shares = [
        share
        for share in ActivityShare
        if any(rank_split.predicted_s[share] or rank_split.measured_s[share] for rank_split in splits)
    ]
    rows = []
    for split in splits[:_MAX_RANKS]:
        rows.append([f"{split.rank}", "predicted", *(format_time(split.predicted_s[share]) for share in shares)])
        rows.append(["", "measured", *(format_time(split.measured_s[share]) for share in shares)])
    headers = ["rank", "", *(share.replace("_", " ") for share in shares)]
    hidden = len(splits) - _MAX_RANKS
    more = f"\nand {hidden} more ranks (--json has all)" if hidden > 0 else ""
    yield format_table_text(headers, rows, indent=0, left=2) + more


def _goodput(goodput: GoodputComparison) -> str:
    """Parts of the time of the run, and its goodput."""
    total_s = sum(goodput.measured_s.values())
    expected_s = sum(goodput.predicted_s.values())
    rows = []
    for part in [*goodput.measured_s, *(part for part in goodput.predicted_s if part not in goodput.measured_s)]:
        seconds, predicted_s = goodput.measured_s.get(part, 0.0), goodput.predicted_s.get(part, 0.0)
        rows.append([part, *_share(predicted_s, expected_s), *_share(seconds, total_s)])
    rows.append(["time of the run", *_share(expected_s, expected_s), *_share(total_s, total_s)])
    headers = ["where the time went", "predicted", "", "measured", ""]
    stops = ", ".join(f"{number} {kind}" for kind, number in goodput.interruptions.items()) or "none"
    lines = [format_table_text(headers, rows, indent=0)]
    if goodput.predicted is None:
        lines.append(f"goodput {format_percent(goodput.measured)}, not predicted; interruptions: {stops}")
    else:
        low, middle, high = map(format_percent, goodput.predicted)
        where = "inside" if goodput.holds else "OUTSIDE"
        said = f"goodput {format_percent(goodput.measured)}, predicted {middle} ({low} to {high}, P5 to P95 of"
        lines.append(f"{said} {goodput.num_runs:,} simulated runs): {where}")
        lines.append(f"interruptions: {stops}; predicted {goodput.predicted_interruptions:.1f} on average")
    return "\n".join(lines)


def _share(seconds: float, total_s: float) -> tuple[str, str]:
    return (format_time(seconds), format_percent(seconds / total_s)) if total_s else ("", "")


def _losses(comparison: Comparison) -> Iterator[str]:
    """Loss against samples and seconds, of the run and of its baselines."""
    curve, others = comparison.loss_curve, [compared.baseline for compared in comparison.baselines]
    if curve is None:
        return
    least = curve.least_loss
    headers = ["samples", "seconds", "loss", f"above {least:.3f}"]
    headers += [head for other in others for head in (f"seconds, {other.name}", "loss", f"above {least:.3f}")]
    num_steps = len(curve.losses)
    rows = []
    for row in range(min(_LOSS_ROWS, num_steps)):
        step = num_steps * (row + 1) // min(_LOSS_ROWS, num_steps) - 1
        samples = curve.num_samples[step]
        cells = [f"{samples:,}", *_loss_cells(curve, step)]
        for other in others:
            cells += _loss_cells(other, other.step_at(samples))
        rows.append(cells)
    yield format_table_text(headers, rows, indent=0, left=0)


def _loss_cells(curve: LossCurve, step: int | None) -> list[str]:
    if step is None:
        return ["-", "-", "-"]
    loss = curve.losses[step]
    return [f"{curve.seconds[step]:.1f}", f"{loss:.3f}", f"{loss - curve.least_loss:.3f}"]


def _loss_notes(comparison: Comparison) -> Iterator[str]:
    curve = comparison.loss_curve
    if curve is None:
        return
    yield (
        f"losses are means of a twentieth of the steps, in nats, of samples before the model trains on them; the best "
        f"possible model has {curve.least_loss:.3f}"
    )
    for reached in comparison.baselines:
        cost = f"{reached.samples_factor:.2f} times the samples and {reached.seconds_factor:.2f} times the seconds"
        yield (
            f"to the loss {reached.loss:.3f}, which both reach, the run takes {reached.num_samples:,} samples and "
            f"{format_time(reached.seconds)}: {cost} of {reached.baseline.name}"
        )


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


_MIN_SHARE = 0.005  # of the peak: errors of smaller parts are not shown


def rehearsal_text(comparison: RehearsalComparison) -> str:
    """Memory, then time by action, then the step of the whole job."""
    parts = [_memory(comparison)]
    if comparison.rehearsed is not None:
        parts += [_actions(comparison.rehearsed), "\n".join(_step(comparison, comparison.rehearsed))]
    notes = ["error = (predicted - measured) / measured", *comparison.notes]
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def _memory(comparison: RehearsalComparison) -> str:
    most_bytes = max(row.measured_bytes for row in comparison.peaks)

    def cells(row: MemoryRow) -> list[str]:
        counts = max(row.predicted_bytes, row.measured_bytes) > _MIN_SHARE * most_bytes
        return [
            row.name.replace("_", " "),
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            format_error(row.signed_error, "") if counts else "",
        ]

    predicted, measured = (
        f"in {action}" if action else "between steps"
        for action in (comparison.predicted_action, comparison.measured_action)
    )
    rows = [cells(row) for row in comparison.peaks]
    rows += [["  " + first, *others] for first, *others in map(cells, comparison.categories)]
    return f"Peak memory of rank {comparison.rank}: predicted {predicted}, measured {measured}\n" + format_table_text(
        ["", "predicted", "measured", "error"], rows
    )


def _actions(rehearsed: Rehearsed) -> str:
    rows = [
        [
            f"{time.kind.value} of stage {time.stage}",
            format_time(time.predicted_s),
            format_time(time.measured_s),
            format_error((time.predicted_s - time.measured_s) / time.measured_s if time.measured_s > 0 else None, ""),
            format_spread(time.relative_std),
        ]
        for time in rehearsed.kinds
        if time.predicted_s > 0 or time.measured_s > 0
    ]
    return "Compute, by action\n" + format_table_text(["", "predicted", "measured", "error", "std"], rows)


def _step(comparison: RehearsalComparison, rehearsed: Rehearsed) -> Iterator[str]:
    low_s, high_s = rehearsed.step_time_interval_s
    yield "Step of the whole job"
    yield (
        f"  rehearsed  {format_time(rehearsed.step_time_s)}  "
        f"(90 % interval {format_time(low_s)} to {format_time(high_s)}): "
        f"{format_percent(rehearsed.measured_share)} of its compute measured, communication modeled"
    )
    yield f"  predicted  {format_time(comparison.predicted_step_time_s)}"
    parts = split_parts(rehearsed.split)
    shown = ", ".join(f"{name} {format_time(part_s)}" for name, part_s in parts.items() if part_s > 0)
    yield f"  of rank {comparison.rank}: {shown}"


_NAMED = 3
_MAX_FACTOR = 100
_ALL = 0.95  # fraction of the total uncertainty that the listed parts cover
_MAX_STDS = 3  # standard deviations of compute, or of communication, that may explain a difference
_LARGE = 0.05  # fraction of the step of a term that may be a candidate


_SLOW = f"what to check in a slow run, or one that is out of memory: {documentation('how-to/troubleshooting')}"


def logged_text(comparison: LoggedComparison) -> str:
    """Table, verdict, hypotheses, the most uncertain parts, categories of memory, and notes."""
    other = comparison.other_framework
    sections = [*([f"warning: {other}"] if other else []), comparison_rows(comparison.rows)]
    notes = ["error = (predicted - measured) / measured"]
    if comparison.interval_holds is not None:
        low, high = (format_time(seconds) for seconds in comparison.interval_s)
        where = "lies in" if comparison.interval_holds else "lies outside of"
        sections.append(
            f"{_slower(comparison.rows[0])}; the measured step time {where} the predicted 90 % interval, "
            f"{low} to {high}\n"
            f"{candidate_causes(comparison)}"
        )
        notes += ["spread = half of p10 to p90 of the steps"]
        notes += [] if comparison.interval_holds else [_SLOW]
    if comparison.hypotheses is not None:
        sections.append(_hypotheses(comparison))
        notes += [_ONE_CHANGE] if comparison.hypotheses else []
    if comparison.memory_terms:
        sections.append(_memory_terms(comparison.memory_terms))
    if comparison.parts:
        sections.append(_parts(comparison.parts))
        notes += _OF_PARTS
    sections.append("\n".join(f"- {note}" for note in (*notes, *comparison.notes)))
    return "\n\n".join(sections)


def _slower(step: ComparisonRow) -> str:
    """Sentence on the measured step time, relative to the prediction."""
    longer = step.measured / step.predicted - 1
    if abs(longer) < _NO_DIFFERENCE:
        return "the run was as fast as predicted"
    return f"a step took {100 * abs(longer):.1f} % {'longer' if longer > 0 else 'less time'} than predicted"


_ONE_CHANGE = (
    "hypotheses: the job predicted again with one change each, listed if the error shrinks by a tenth or more; several "
    "may explain the same numbers, and a slow rank or a busy host fits almost any slower log"
)
_OF_PARTS = (
    "std: one standard deviation of the cost estimates; correlated for all compute, and for all communication",
    "hidden: communication that overlaps compute; part of it is exposed if it is slower than predicted",
    "alone: slowdown of this part alone that would explain the whole difference; a bound for communication that "
    "overlaps compute (<= or >=), whose hidden time changes as well",
)
_NO_HYPOTHESIS = (
    "no single change that was tried brings the prediction closer: compilation, recomputation, attention kernel, "
    "links, the network between nodes, a slow rank, host work, gradient synchronization, sharding, microbatch size"
)


def _hypotheses(comparison: LoggedComparison) -> str:
    hypotheses = comparison.hypotheses or ()
    if not hypotheses:
        return _NO_HYPOTHESIS
    times, peaks = hypotheses[0].step_error is not None, hypotheses[0].peak_error is not None
    headers = ["what could explain it", *(["step time", "error"] if times else [])]
    headers += [*(["peak memory", "error"] if peaks else []), ""]
    rows = []
    for hypothesis in hypotheses:
        row = [
            hypothesis.change,
            *([format_time(hypothesis.step_time_s), format_error(hypothesis.step_error)] if times else []),
        ]
        row += [_value(hypothesis.peak_gib or 0.0, "GiB"), format_error(hypothesis.peak_error)] if peaks else []
        rows.append([*row, "explains it" if hypothesis.explains else ""])
    return format_table_text(headers, rows, indent=0)


def _memory_terms(terms: tuple[MemoryTerm, ...]) -> str:
    single = any(term.factor is not None for term in terms)
    headers = ["at the predicted peak", "predicted", *(["alone"] if single else [])]
    rows = [
        [
            term.category.replace("_", " "),
            _value(term.predicted_gib, "GiB"),
            *([factor_words(term.factor)] if single else []),
        ]
        for term in terms
    ]
    text = format_table_text(headers, rows, indent=0)
    return text if single else f"{text}\nno single category could be that much smaller"


def factor_words(factor: float | None) -> str:
    """``x 1.20``; ``x > 100`` for a factor that says nothing but that; empty for None."""
    return "" if factor is None else f"x {factor:,.2f}" if factor < _MAX_FACTOR else f"x > {_MAX_FACTOR}"


def candidate_causes(comparison: LoggedComparison) -> str:
    """One sentence: the most uncertain parts that could explain the difference; the largest parts if none could.

    Empty if the log has no step time.
    """
    difference_s = comparison.difference_s
    if difference_s is None:
        return ""
    difference = f"the difference of {signed_time(difference_s)}"
    if comparison.rows[0].within_spread:
        return f"{difference} is within the spread of the steps: it is not significant"
    std_s = {  # errors of compute go together, and those of communication
        moves: sum(part.std_s for part in comparison.parts if _moves(part) is moves) for moves in (False, True)
    }
    likely = [p for p in comparison.parts if _MAX_STDS * std_s[_moves(p)] >= abs(difference_s)]
    if not likely:
        large = [part for part in comparison.parts if _size_s(part) >= _LARGE * comparison.rows[0].predicted]
        largest = sorted(large, key=_size_s, reverse=True)[:_NAMED]
        return (
            f"no term's uncertainty explains {difference}: it is more than {_MAX_STDS} standard deviations of compute "
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
    yield alone_words(part)


def alone_words(part: UncertainTerm) -> str:
    """``x 1.20``; ``<= x 1.20`` for communication that overlaps compute, ``>= x 0.80`` where it would be faster.

    Empty if unknown, also for a bound so far away that it bounds nothing.
    """
    times = part.times_as_long
    if times is None or not part.hidden_s:
        return factor_words(times)
    return "" if times >= _MAX_FACTOR else f"{'<=' if times > 1 else '>='} x {times:,.2f}"
