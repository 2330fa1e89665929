"""Two plans side by side: bars for groups of terms, and all terms as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.figures.style import Figure, bar, figure
from app.palette import PLANS
from simplan.explain import DifferenceRow
from simplan.units import GIB

__all__ = ["difference_figure", "difference_rows", "difference_words"]


def difference_rows(rows: Sequence[DifferenceRow]) -> list[dict[str, Any]]:
    """A row for each term, in seconds or GiB; the difference is the second less the first."""
    return [
        {
            "group": row.group.replace("_", " "),
            "term": row.name,
            "first": _shown(row.first, row.unit),
            "second": _shown(row.second, row.unit),
            "difference": _shown(row.difference, row.unit),
            "first formula": row.first_formula,
            "second formula": row.second_formula,
        }
        for row in rows
    ]


def difference_figure(rows: Sequence[DifferenceRow], names: tuple[str, str]) -> Figure:
    """Groups of terms with one bar per plan, sorted by difference, largest on top.

    Args:
        rows: Terms of the step time or of memory.
        names: Short names of the two plans.
    """
    groups = _groups(rows)
    ordered = sorted(groups, key=lambda group: -abs(groups[group][1] - groups[group][0]))
    unit = "GiB" if any(row.unit == "bytes" for row in rows) else "s"
    bars = [
        bar(
            name=name,
            orientation="h",
            y=[f"{group.replace('_', ' ')} " for group in ordered],
            x=[groups[group][index] for group in ordered],
            marker={
                "color": PLANS[index],
                "line": {"width": 0},
                "pattern": {"shape": "/" if index else "", "solidity": 0.15},
            },
            customdata=[[groups[group][1] - groups[group][0]] for group in ordered],
            hovertemplate=f"{name}: %{{x:,.4~g}} {unit}<br>difference: %{{customdata[0]:+,.4~g}} {unit}"
            "<extra>%{y}</extra>",
        )
        for index, name in enumerate(names)
    ]
    return figure(
        bars,
        height=90 + 40 * len(ordered),
        barmode="group",
        bargap=0.3,
        bargroupgap=0.05,
        xaxis={"title": "GiB at the worst instant" if unit == "GiB" else "seconds of one step"},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
    )


def difference_words(rows: Sequence[DifferenceRow]) -> list[str]:
    """The groups that make the difference, the largest first: ``wait: +0.12 s``."""
    unit = "GiB" if any(row.unit == "bytes" for row in rows) else "s"
    found = sorted(((pair[1] - pair[0], group) for group, pair in _groups(rows).items()), key=lambda one: -abs(one[0]))
    return [f"{group.replace('_', ' ')} {value:+,.3g} {unit}" for value, group in found[:3] if value]


def _groups(rows: Sequence[DifferenceRow]) -> dict[str, tuple[float, float]]:
    groups: dict[str, tuple[float, float]] = {}
    for row in rows:
        first, second = groups.get(row.group, (0.0, 0.0))
        groups[row.group] = (first + _shown(row.first, row.unit), second + _shown(row.second, row.unit))
    return groups


def _shown(value: float, unit: str) -> float:
    return value / GIB if unit == "bytes" else value
