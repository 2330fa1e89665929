"""An explanation in words, and the difference of two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from simplan.explain import Difference, DifferenceRow, ExplainedTerm, Explanation
from simplan.report.table import format_table_text
from simplan.units import format_bytes, format_percent, format_time

__all__ = ["difference_text", "explanation_text"]

_WRAP = 118


def explanation_text(explanation: Explanation) -> str:
    """Every part with its share of the whole and its formula."""
    when = f"during {explanation.memory_action}" if explanation.memory_action else "between steps"
    return "\n\n".join(
        [
            f"{explanation.name}: {format_time(explanation.step_time_s)} a step on rank {explanation.rank}, which "
            "computes longest; the parts sum to it",
            "\n".join(_parts(explanation.time, explanation.step_time_s)),
            f"Memory of rank {explanation.memory_rank}, which needs most: {format_bytes(explanation.device_bytes)} "
            f"{when}; the parts sum to it",
            "\n".join(_parts(explanation.memory, explanation.device_bytes)),
            "\n".join(["Figures", *(f"  {_value(p)} {p.name} = {p.formula}" for p in explanation.figures)]),
        ]
    )


def _parts(parts: Iterable[ExplainedTerm], whole: float) -> Iterator[str]:
    """One line per group, followed by its parts, each with its formula on a separate line."""
    for group, found in groupby(parts, key=lambda part: part.group):
        members = list(found)
        total = sum(part.value for part in members)
        unit = members[0].unit
        yield f"  {_number(total, unit):>10}  {format_percent(total / whole):>6}  {group.replace('_', ' ')}"
        for part in members:
            named = part.name != part.group
            if named:
                yield f"  {_number(part.value, unit):>10}          - {part.name}{_how_sure(part)}"
            yield from _wrapped(part.formula, indent=" " * (24 if named else 22))


def _how_sure(part: ExplainedTerm) -> str:
    if part.provenance is None or part.relative_std is None:
        return ""
    return f"  [{part.provenance}, +/- {format_percent(part.relative_std)}]"


def _wrapped(text: str, indent: str) -> Iterator[str]:
    line = indent
    for word in text.split():
        if len(line) + len(word) > _WRAP and line.strip():
            yield line.rstrip()
            line = indent
        line += word + " "
    if line.strip():
        yield line.rstrip()


def difference_text(difference: Difference) -> str:
    """Terms of both predictions next to each other, with their contributions to the difference."""
    first, second = difference.first, difference.second
    needs = second.device_bytes - first.device_bytes
    return "\n\n".join(
        [
            f"{first.name} -> {second.name}: a step {_signed(difference.step_time_s, 's')} "
            f"({format_time(first.step_time_s)} -> {format_time(second.step_time_s)}), "
            f"memory {_signed(needs, 'bytes')} "
            f"({format_bytes(first.device_bytes)} -> {format_bytes(second.device_bytes)})\n{_main_reason(difference)}",
            _table(difference.categories),
            f"Time (rank {first.rank} and rank {second.rank}); the differences sum to that of the step",
            _table(difference.time),
            f"Memory (rank {first.memory_rank} and rank {second.memory_rank}); the differences sum to that of the peak",
            _table(difference.memory),
            "Figures",
            _table(difference.figures),
        ]
    )


def _main_reason(difference: Difference) -> str:
    """One sentence: the category with most of the difference of the steps, and its largest term."""
    reason = difference.main_category
    if reason is None:
        return "The step times are equal within 0.1 %."
    terms = [row for row in difference.time if row.group == reason.group]
    largest = max(terms, key=lambda row: row.difference * difference.step_time_s)
    term = f" (largest term: {largest.name}, {_signed(largest.difference, 's')})" if len(terms) > 1 else ""
    than = "longer" if difference.step_time_s > 0 else "shorter"
    return f"The second step is {than} mainly because of {reason.name}: {_signed(reason.difference, 's')}{term}."


def _table(rows: Iterable[DifferenceRow]) -> str:
    cells = [
        [
            row.group.replace("_", " ") if row.group == row.name else f"{row.group.replace('_', ' ')}: {row.name}",
            _number(row.first, row.unit),
            _number(row.second, row.unit),
            _signed(row.difference, row.unit),
        ]
        for row in rows
    ]
    return format_table_text(["", "first", "second", "difference"], cells)


def _value(part: ExplainedTerm) -> str:
    return _number(part.value, part.unit)


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return format_time(value) if value >= 0 else f"-{format_time(-value)}"
    if unit == "bytes":
        return format_bytes(value) if value >= 0 else f"-{format_bytes(-value)}"
    return f"{value:,.4g}"


def _signed(value: float, unit: str) -> str:
    return _number(value, unit) if value < 0 else f"+{_number(value, unit)}"
