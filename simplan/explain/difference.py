"""Difference of two explanations, term by term."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from simplan.explain.explanation import Explanation
from simplan.explain.term import ExplainedTerm
from simplan.model.step_work import WorkUnit, work_differences, work_unit
from simplan.units import format_difference, format_percent, format_time

_CATEGORIES = ("compute", "recompute", "exposed communication", "wait", "host", "optimizer")
"""Groups of terms that sum to the step time."""

_NUM_RANKS = re.compile(r" over \d+ ranks")

_EQUAL = 1e-3
"""Relative difference below which step times are equal."""


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One term in both explanations.

    Attributes:
        group, name, unit: See ``ExplainedTerm``.
        first, second: Values of the term; 0 if it is absent.
        first_formula, second_formula: Formulas with numbers; empty if the term is absent.
    """

    group: str
    name: str
    unit: str
    first: float
    second: float
    first_formula: str
    second_formula: str

    @property
    def difference(self) -> float:
        """Second minus first."""
        return self.second - self.first


@dataclass(frozen=True, slots=True)
class Difference:
    """Second minus first explanation; rows of time and memory sum to the total differences."""

    first: Explanation
    second: Explanation
    time: tuple[DifferenceRow, ...]
    memory: tuple[DifferenceRow, ...]
    figures: tuple[DifferenceRow, ...]

    @property
    def step_time_s(self) -> float:
        """Second minus first step time, in seconds."""
        return self.second.step_time_s - self.first.step_time_s

    @property
    def categories(self) -> tuple[DifferenceRow, ...]:
        """Time by category: one row for each of ``_CATEGORIES``."""
        return tuple(
            DifferenceRow(
                group=category,
                name=category,
                unit="s",
                first=sum(row.first for row in self.time if row.group == category),
                second=sum(row.second for row in self.time if row.group == category),
                first_formula="",
                second_formula="",
            )
            for category in _CATEGORIES
        )

    @property
    def unit(self) -> WorkUnit:
        """Unit of work in which the steps are compared: a step, or a sample or tokens of steps of unequal work."""
        return work_unit([self.first.step_work, self.second.step_work])

    @property
    def main_category(self) -> DifferenceRow | None:
        """Category that contributes most to the difference per ``unit``; None if the times are equal within 0.1%."""
        total_s = self._per_unit_s
        if abs(total_s[1] - total_s[0]) <= _EQUAL * total_s[0]:
            return None
        return self._largest(self.categories)

    def reasons(self, first: str = "", second: str = "") -> tuple[str, ...]:
        """Sentences: what differs besides the plans, and the category and term with most of the difference.

        Args:
            first, second: Names of the plans; empty for those of the explanations.
        """
        names = first or self.first.name, second or self.second.name
        works = work_differences(names, [self.first.step_work, self.second.step_work])
        return (*works, self._main_reason(f"the step of {second}" if second else "the second step"))

    def _main_reason(self, step: str) -> str:
        unit, (first_s, second_s) = self.unit.name, self._per_unit_s
        main = self.main_category
        if main is None:
            return f"The {'step times' if unit == 'step' else f'times per {unit}'} are equal within 0.1 %."
        term = self._largest(row for row in self.time if row.group == main.group)
        has_terms = sum(row.group == main.group for row in self.time) > 1
        largest = f" (largest term: {term.name}, {format_difference(self._of_unit(term).difference, 's')})"
        than = "longer" if second_s > first_s else "shorter"
        sentence = f"{main.name}: {format_difference(self._of_unit(main).difference, 's')}{largest * has_terms}."
        if unit == "step":
            return f"{step[:1].upper()}{step[1:]} is {than} mainly because of {sentence}"
        change = format_percent(abs(second_s / first_s - 1))
        times = f"{format_time(first_s)} -> {format_time(second_s)}"
        return f"Per {unit}, {step} is {change} {than} ({times}), mainly because of {sentence}"

    @property
    def _per_unit_s(self) -> tuple[float, float]:
        """Step times per ``unit``."""
        first, second = self.unit.amounts
        return self.first.step_time_s / first, self.second.step_time_s / second

    def _of_unit(self, row: DifferenceRow) -> DifferenceRow:
        """A row of time per ``unit``."""
        first, second = self.unit.amounts
        return replace(row, first=row.first / first, second=row.second / second)

    def _largest(self, rows: Iterable[DifferenceRow]) -> DifferenceRow:
        """Row of time that contributes most to the difference per ``unit``."""
        first_s, second_s = self._per_unit_s
        return max(rows, key=lambda row: self._of_unit(row).difference * (second_s - first_s))

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""

        def rows(found: Iterable[DifferenceRow]) -> list[dict[str, Any]]:
            return [asdict(row) | {"difference": row.difference} for row in found]

        return {
            "schema_version": 1,
            "kind": "difference",
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "step_time_s": self.step_time_s,
            "device_bytes": self.second.device_bytes - self.first.device_bytes,
            "categories": [
                {"name": row.name, "first": row.first, "second": row.second, "difference": row.difference}
                for row in self.categories
            ],
            "unit": asdict(self.unit),
            "reasons": list(self.reasons()),
            "main_category": None if self.main_category is None else self.main_category.name,
            "time": rows(self.time),
            "memory": rows(self.memory),
            "figures": rows(self.figures),
        }


def difference(first: Explanation, second: Explanation) -> Difference:
    """Match the terms of two explanations by name."""
    parts = ((first.time, second.time), (first.memory, second.memory), (first.figures, second.figures))
    return Difference(first, second, *(_lined_up(*pair) for pair in parts))


def _lined_up(first: Iterable[ExplainedTerm], second: Iterable[ExplainedTerm]) -> tuple[DifferenceRow, ...]:
    """Rows by group, largest difference first; terms of the same name are summed.

    Layers are cut at their collectives (``block forward: q to proj``), so that plans may have other parts. The parts of
    a layer are summed where the two sides have different ones. So are collectives of one kind and axis, if the two
    sides have groups of other sizes: 4.4 s over 4 ranks that become 10.3 s over 8 ranks are 5.9 s more.
    """
    first, second = tuple(first), tuple(second)
    parts = [_names_by_whole(side) for side in (first, second)]
    differ = {whole for whole in parts[0].keys() & parts[1].keys() if parts[0][whole] != parts[1][whole]}
    ones, others = _by_name(first, differ), _by_name(second, differ)
    groups = list(dict.fromkeys(group for group, _ in (*ones, *others)))
    rows = []
    for key in dict.fromkeys((*ones, *others)):
        before, after = ones.get(key, []), others.get(key, [])
        rows.append(
            DifferenceRow(
                group=key[0],
                name=key[1],
                unit=(before or after)[0].unit,
                first=sum(part.value for part in before),
                second=sum(part.value for part in after),
                first_formula="; ".join(part.formula for part in before),
                second_formula="; ".join(part.formula for part in after),
            )
        )
    return tuple(sorted(rows, key=lambda row: (groups.index(row.group), -abs(row.difference))))


def _by_name(
    terms: Iterable[ExplainedTerm], merged: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[ExplainedTerm]]:
    """Terms by group and name, or by group and whole for wholes in ``merged``."""
    terms_by_name: dict[tuple[str, str], list[ExplainedTerm]] = {}
    for term in terms:
        whole = (term.group, _whole(term))
        terms_by_name.setdefault(whole if whole in merged else (term.group, term.name), []).append(term)
    return terms_by_name


def _names_by_whole(terms: Iterable[ExplainedTerm]) -> dict[tuple[str, str], set[str]]:
    """Names of the terms of each group and whole."""
    names: dict[tuple[str, str], set[str]] = {}
    for term in terms:
        names.setdefault((term.group, _whole(term)), set()).add(term.name)
    return names


def _whole(term: ExplainedTerm) -> str:
    """Name without the part of the layer, or of a collective without the size of its group."""
    return _NUM_RANKS.sub("", term.name).partition(": ")[0]
