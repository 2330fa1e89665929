"""Explanation of a prediction as text, and the difference of two explanations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from textwrap import wrap

from simplan.cost.model import Limit
from simplan.explain import Difference, DifferenceRow, ExplainedTerm, Explanation
from simplan.report.table import format_table_text
from simplan.report.text import device_memory_words, links_words
from simplan.units import counted, format_difference, format_percent, format_time, format_value

_WRAP = 118
_SAID_BY_NAME = (Limit.SLOWEST, Limit.HOST, Limit.TIMING)


def explanation_text(explanation: Explanation, *, kernels: bool = False) -> str:
    """Every term of step time and memory with its fraction and its formula.

    Args:
        kernels: Show the kernels of each term as well.
    """
    when = f"during {explanation.memory_action}" if explanation.memory_action else "between steps"
    return "\n\n".join(
        [
            f"{explanation.name}: {format_time(explanation.step_time_s)} a step on rank {explanation.rank}, the "
            "rank with the longest compute time; the parts sum to the step time",
            "\n".join(_parts(explanation.time, explanation.step_time_s, kernels=kernels)),
            f"Memory of rank {explanation.memory_rank}, the peak-memory rank: {device_memory_words(explanation)} "
            f"{when}; the parts sum to the peak",
            "\n".join(_parts(explanation.memory, explanation.device_bytes)),
            "\n".join(
                ["Figures", *(f"  {format_value(p.value, p.unit)} {p.name} = {_said(p)}" for p in explanation.figures)]
            ),
            *_links(explanation),
            *([f"Placement\n  {explanation.placement}"] if explanation.placement else []),
            *([f"Slow ranks\n  {explanation.stragglers}"] if explanation.stragglers else []),
            *([f"Jitter\n  {explanation.jitter}"] if explanation.jitter else []),
            *([f"Backup workers\n  {explanation.backup_workers}"] if explanation.backup_workers else []),
        ]
    )


def _links(explanation: Explanation) -> Iterator[str]:
    """Paragraph on the links, contention on them, and other jobs."""
    links = links_words(explanation.links)
    lines = [f"  {links}"] if links else []
    if explanation.contention is not None:
        what = "; each of these changes was tried:" if explanation.advice else ""
        lines += wrap(f"{explanation.contention}{what}", _WRAP, initial_indent="  ", subsequent_indent="  ")
    for sentence in explanation.advice:
        lines += wrap(f"- {sentence}", _WRAP, initial_indent="    ", subsequent_indent="      ")
    if explanation.background:
        lines += wrap(f"other jobs: {explanation.background}", _WRAP, initial_indent="  ", subsequent_indent="  ")
    if lines:
        yield "\n".join(["Links", *lines])


def _parts(parts: Iterable[ExplainedTerm], whole: float, *, kernels: bool = False) -> Iterator[str]:
    """One line per group, followed by its parts, each with its formula on a separate line."""
    for group, terms in groupby(parts, key=lambda part: part.group):
        members = list(terms)
        total = sum(part.value for part in members)
        unit = members[0].unit
        yield f"  {format_value(total, unit):>10}  {format_percent(total / whole):>6}  {group.replace('_', ' ')}"
        for part in members:
            named = part.name != part.group
            if named:
                yield f"  {format_value(part.value, unit):>10}          - {part.name}{_source(part)}"
            margin = 24 if named else 22
            yield from _wrapped(_said(part), margin)
            yield from _rows(part, margin, kernels=kernels)


def _said(term: ExplainedTerm) -> str:
    return f"{term.formula}; {term.note}" if term.note else term.formula


def _rows(term: ExplainedTerm, margin: int, *, kernels: bool) -> Iterator[str]:
    """Rows of the parts of a term: those of communication always, at most two of them without ``kernels``."""
    is_moved = term.group == "exposed communication"
    if not is_moved and (not kernels or len(term.parts) == 1):
        return
    shown = term.parts if kernels else term.parts[:2]
    for part in shown:
        bound = "" if part.limit in _SAID_BY_NAME else f", bound by {part.limit}"
        yield from _wrapped(f"{format_value(part.value, 's')} {part.name}{bound}", margin + 2)
        yield from _wrapped(part.formula, margin + 4)
    if hidden := len(term.parts) - len(shown):
        yield from _wrapped(f"and {counted(hidden, 'more size')}", margin + 2)


def _wrapped(text: str, margin: int) -> list[str]:
    indent = " " * margin
    return wrap(
        " ".join(text.split()),
        _WRAP,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _source(part: ExplainedTerm) -> str:
    if part.provenance is None or part.relative_std is None:
        return ""
    return f"  [{part.provenance}, +/- {format_percent(part.relative_std)}]"


def difference_text(difference: Difference) -> str:
    """Terms of both predictions next to each other, with their contributions to the difference."""
    first, second = difference.first, difference.second
    needs = second.device_bytes - first.device_bytes
    return "\n\n".join(
        [
            f"{first.name} -> {second.name}: a step {format_difference(difference.step_time_s, 's')} "
            f"({format_time(first.step_time_s)} -> {format_time(second.step_time_s)}), "
            f"memory {format_difference(needs, 'bytes')} "
            f"({device_memory_words(first)} -> {device_memory_words(second)})\n" + "\n".join(difference.reasons()),
            _table(difference.categories),
            f"Time (rank {first.rank} and rank {second.rank}); the differences sum to that of the step",
            _table(difference.time),
            f"Memory (rank {first.memory_rank} and rank {second.memory_rank}); the differences sum to that of the peak",
            _table(difference.memory),
            "Figures",
            _table(difference.figures),
        ]
    )


def _table(rows: Iterable[DifferenceRow]) -> str:
    cells = [
        [
            row.group.replace("_", " ") if row.group == row.name else f"{row.group.replace('_', ' ')}: {row.name}",
            format_value(row.first, row.unit),
            format_value(row.second, row.unit),
            format_difference(row.difference, row.unit),
        ]
        for row in rows
    ]
    return format_table_text(["", "first", "second", "difference"], cells)
