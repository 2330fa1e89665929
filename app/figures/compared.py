"""Plans next to each other, for lessons and comparisons of scenarios: memory and step by part, and their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.figures.plan import memory_bars, memory_stack, plan_result
from app.figures.style import (
    CAPACITY,
    CATEGORIES,
    MUTED,
    PLANS,
    SPLIT,
    Figure,
    bar,
    empty,
    figure,
    scatter,
    stack,
)
from app.predictions import Headline, headline_of_prediction
from simplan.errors import SpecError
from simplan.explain import DifferenceRow
from simplan.program.program import MemoryCategory
from simplan.report.drawings.drawing import time_unit
from simplan.report.text import split_parts
from simplan.units import GIB, format_bytes, format_time

_HEIGHT_PX = 430  # a legend in one column, on a phone, takes up to half of it
_NOTHING = "None of these plans has a prediction."


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """One plan among others.

    Attributes:
        name: Label of the plan.
        refused: Error of a plan without a prediction; empty otherwise, and the fields below are set.
        headline: Step time and memory with intervals, throughput and MFU; None for a refused plan.
        split_s: Seconds of the step of the rank with the longest compute time, by part; they sum to the step.
    """

    name: str
    refused: str = ""
    headline: Headline | None = None
    split_s: dict[str, float] = field(default_factory=dict)


def compared_plans(texts: Sequence[tuple[str, str]], calibrated_at: int = 0) -> tuple[ComparedPlan, ...]:
    """Predicts several scenarios.

    Args:
        texts: Name and YAML of each scenario.
        calibrated_at: Modification time of this machine's calibration, a cache key.
    """
    return tuple(compared_plan(name, text, calibrated_at) for name, text in texts)


def compared_plan(name: str, text: str, calibrated_at: int) -> ComparedPlan:
    """Predicts one scenario; an error becomes ``ComparedPlan.refused``."""
    try:
        result = plan_result(text, calibrated_at)
    except SpecError as error:
        return ComparedPlan(name, error.sentences)
    prediction = result.prediction
    index = next(i for i, memory in enumerate(prediction.memory) if memory.rank == result.busiest)
    return ComparedPlan(
        name,
        headline=headline_of_prediction(prediction),
        split_s=dict(split_parts(prediction.splits[index])),
    )


def plan_numbers(plans: Sequence[ComparedPlan], column: str) -> list[dict[str, object]]:
    """Table rows of the plans with a prediction.

    Args:
        plans: Plans.
        column: Column of their names.
    """
    rows = []
    for name, head, split_s in _predicted(plans):
        low_s, high_s = head.step_time_interval_s or (None, None)
        row: dict[str, object] = {column: name, "num_devices": head.job.cluster.num_devices}
        row |= {"step_time_s": head.step_time_s, "low_s": low_s, "high_s": high_s, "mfu": head.mfu}
        row |= {"tokens_per_s": head.tokens_per_s, "device_gib": head.memory.device_bytes / GIB}
        row |= {f"{part.replace(' ', '_')}_s": seconds for part, seconds in split_s.items()}
        rows.append(
            row | {f"{category}_gib": head.memory.by_category.get(category, 0) / GIB for category in MemoryCategory}
        )
    return rows


def _predicted(plans: Sequence[ComparedPlan]) -> list[tuple[str, Headline, dict[str, float]]]:
    """Name, key numbers and split of the plans with a prediction."""
    return [(plan.name, plan.headline, plan.split_s) for plan in plans if plan.headline is not None]


def memory_stacks(plans: Sequence[ComparedPlan], title: str, chosen: str = "") -> Figure:
    """Memory of each plan's peak-memory rank by category, with the capacity of its devices as a dashed line.

    Args:
        plans: Plans; refused ones have no bar.
        title: Title of the x axis.
        chosen: Name of the plan to emphasize; empty for none.
    """
    shown = _predicted(plans)
    if not shown:
        return empty(_NOTHING)
    names, memory = [name for name, _, _ in shown], [head.memory for _, head, _ in shown]
    traces = memory_stack([memory_bars([of_rank])[0] for of_rank in memory], names)
    limits = [(place, of_rank.capacity_bytes / GIB) for place, of_rank in enumerate(memory) if of_rank.capacity_bytes]
    if limits:
        traces.append(scatter(x=[None], y=[None], mode="lines", line=CAPACITY, name="device memory"))  # for the legend
    lines = [
        {"type": "line", "x0": place - 0.42, "x1": place + 0.42, "y0": limit, "y1": limit, "line": CAPACITY}
        for place, limit in limits
    ]
    tops = [
        (of_rank.device_bytes / GIB, *(limit / GIB for limit in of_rank.device_interval_bytes)) for of_rank in memory
    ]
    words = [" to ".join(map(format_bytes, of_rank.device_interval_bytes)) for of_rank in memory]
    traces.append(_intervals(names, tops, words))
    most = max([high for _, _, high in tops] + [limit for _, limit in limits])
    return _stacks(traces, names, title, "GiB at the peak", chosen, most, shapes=lines)


def step_stacks(plans: Sequence[ComparedPlan], title: str, chosen: str = "") -> Figure:
    """Step of each plan by part, with the 90 % interval of the step time.

    Args:
        plans: Plans; refused ones have no bar.
        title: Title of the x axis.
        chosen: Name of the plan to emphasize; empty for none.
    """
    shown = _predicted(plans)
    if not shown:
        return empty(_NOTHING)
    names, steps_s = [name for name, _, _ in shown], [head.step_time_s for _, head, _ in shown]
    unit, unit_s = time_unit(max(steps_s))
    parts = {part: [split_s.get(part, 0.0) for _, _, split_s in shown] for part in SPLIT}
    tooltips = {
        part: [
            f"{format_time(part_s)}, {part_s / step_s:.1%} of {format_time(step_s)}"
            for part_s, step_s in zip(parts_s, steps_s, strict=True)
        ]
        for part, parts_s in parts.items()
    }
    traces = stack(
        names, {part: [seconds / unit_s for seconds in parts_s] for part, parts_s in parts.items()}, tooltips
    )
    limits_s = [head.step_time_interval_s or (head.step_time_s,) * 2 for _, head, _ in shown]
    tops = [(s / unit_s, low_s / unit_s, high_s / unit_s) for s, (low_s, high_s) in zip(steps_s, limits_s, strict=True)]
    traces.append(_intervals(names, tops, [" to ".join(map(format_time, limits)) for limits in limits_s]))
    return _stacks(traces, names, title, f"step time, {unit}", chosen, max(high for _, _, high in tops))


def _intervals(names: Sequence[str], tops: Sequence[tuple[float, ...]], words: Sequence[str]) -> dict[str, Any]:
    """90 % intervals as lines through the tops of the bars.

    Args:
        names: Names of the bars.
        tops: Value, low and high end of each bar.
        words: Interval of each bar.
    """
    error = {
        "type": "data",
        "symmetric": False,
        "array": [high - value for value, _, high in tops],
        "arrayminus": [value - low for value, low, _ in tops],
        "color": MUTED,
        "thickness": 1.5,
    }
    return scatter(
        x=list(names),
        y=[value for value, _, _ in tops],
        mode="markers",
        marker={"size": 5, "color": MUTED},
        error_y=error,
        name="90 % interval",
        customdata=[[text] for text in words],
        hovertemplate="90 % interval %{customdata[0]}<extra>%{x}</extra>",
    )


def _stacks(
    traces: list[dict[str, Any]], names: Sequence[str], x: str, y: str, chosen: str, most: float, **layout: Any
) -> Figure:
    words = [f"<b>{name}</b>" if name == chosen else name for name in names]
    ticks = {"tickvals": list(names), "ticktext": words, "range": [-0.5, len(names) - 0.5]}
    xaxis = {"title": x, "type": "category", "showgrid": False, **ticks}
    yaxis = {"title": y, "range": [0, 1.06 * most]}
    return figure(traces, height=_HEIGHT_PX, barmode="stack", bargap=0.35, xaxis=xaxis, yaxis=yaxis, **layout)


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
        xaxis={"title": "GiB at the peak" if unit == "GiB" else "step time, s"},
        yaxis=CATEGORIES,
    )


def difference_words(rows: Sequence[DifferenceRow]) -> list[str]:
    """The groups that make the difference, the largest first: ``wait: +0.12 s``."""
    unit = "GiB" if any(row.unit == "bytes" for row in rows) else "s"
    changes = sorted(
        ((pair[1] - pair[0], group) for group, pair in _groups(rows).items()), key=lambda change: -abs(change[0])
    )
    return [f"{group.replace('_', ' ')} {value:+,.3g} {unit}" for value, group in changes[:3] if value]


def _groups(rows: Sequence[DifferenceRow]) -> dict[str, tuple[float, float]]:
    groups: dict[str, tuple[float, float]] = {}
    for row in rows:
        first, second = groups.get(row.group, (0.0, 0.0))
        groups[row.group] = (first + _shown(row.first, row.unit), second + _shown(row.second, row.unit))
    return groups


def _shown(value: float, unit: str) -> float:
    return value / GIB if unit == "bytes" else value
