"""Plans of a search: table rows, scatter plot, step breakdown and outcomes of the space; difference of two plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from app.figures.style import CATEGORIES, MUTED, PLANS, SPLIT, Figure, bar, empty, figure, scatter
from simplan.explain import DifferenceRow
from simplan.plan.plan import ParallelPlan
from simplan.report.search import RESOURCES, alike_words, search_plan_words, space_rows
from simplan.search import RankedPlan, SearchResult, SpaceCount
from simplan.units import GIB, format_number


@dataclass(frozen=True, slots=True)
class Axis:
    """A number of a plan that can be drawn.

    Attributes:
        label: Name with unit.
        form: Number format for tooltips, in d3 syntax.
        less_is_better: True when smaller is better; None when neither direction is better.
    """

    label: str
    form: str = ",.4~g"
    less_is_better: bool | None = None


AXES: Mapping[str, Axis] = MappingProxyType(
    {
        "step_time_s": Axis("step time, s", less_is_better=True),
        "device_gib": Axis("device memory, GiB", ",.2f", less_is_better=True),
        "headroom_gib": Axis("memory headroom, GiB", ",.2f", less_is_better=False),
        "tokens_per_s_per_device": Axis("throughput per device, 1/s", ",.0f", less_is_better=False),
        "mfu": Axis("MFU", ".1%", less_is_better=False),
        "num_devices": Axis("devices", ",d", less_is_better=True),
        "cost_dollars": Axis("cost of the token budget, dollars", ",.0f", less_is_better=True),
        "tp": Axis("tensor-parallel ranks", ",d"),
        "cp": Axis("context-parallel ranks", ",d"),
        "ep": Axis("expert-parallel ranks", ",d"),
        "pp": Axis("pipeline ranks", ",d"),
        "virtual_stages": Axis("stages per rank", ",d"),
        "dp_replicate": Axis("replicas", ",d"),
        "dp_shard": Axis("shards", ",d"),
        "microbatch_size": Axis("microbatch size", ",d"),
    }
)
"""Quantities for the axes, by key of a row."""

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "schedule": "schedule",
        "recompute": "recomputation",
        "zero_stage": "ZeRO stage",
        "tp": "tensor-parallel ranks",
        "pp": "pipeline ranks",
        "limit": "bottleneck",
    }
)
"""Fields for the color of points, by key of a row."""

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")


def plan_rows(result: SearchResult) -> list[dict[str, Any]]:
    """One row per plan of a search result: ranked plans first, then the others of the Pareto front.

    All rows have the same columns. Plan fields that no plan sets are left out.
    """
    ranked = [(rank, plan) for rank, plan in enumerate(result.ranked, 1)]
    others = [(None, plan) for plan in result.pareto if plan not in result.ranked]
    front = [plan.plan for plan in result.pareto]
    rows = [_row(rank, plan, result, plan.plan in front) for rank, plan in [*ranked, *others]]
    unset = [key for key in ParallelPlan.model_fields if all(row[key] is None for row in rows)]
    return [{key: value for key, value in row.items() if key not in unset} for row in rows]


def _row(rank: int | None, plan: RankedPlan, result: SearchResult, on_front: bool) -> dict[str, Any]:
    why, best = plan.explanation, result.ranked[0]
    return {
        "rank": rank,
        "plan": search_plan_words(plan.plan),
        "step_time_s": plan.step_time_s,
        "vs_best": plan.step_time_s / best.step_time_s - 1,
        "device_gib": plan.device_bytes / GIB,
        "memory_verdict": why.memory_verdict if why else None,
        "headroom_gib": None if plan.headroom_bytes is None else plan.headroom_bytes / GIB,
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        "mfu": why.mfu if why else None,
        "limit": why.limit.replace("_", " ") if why else None,
        "limit_share": why.shares[why.limit] if why else None,
        "help": RESOURCES[why.help] if why and why.help else None,
        "help_share": why.saved[why.help] if why and why.help else None,
        "num_devices": plan.num_devices,
        "cost_dollars": plan.cost_dollars,
        "on_front": on_front,
        "alike": plan.alike.num_plans or None,
        "alike_differ_in": alike_words(plan.alike) or None,
        **plan.plan.model_dump(mode="json"),
    }


def plans_figure(rows: Sequence[Mapping[str, Any]], x: str, y: str, colour: str, pinned: Iterable[str] = ()) -> Figure:
    """Plans as points, with the Pareto front of the two axes as a line; pinned plans have a ring.

    Args:
        rows: Rows from ``plan_rows``.
        x, y: Keys of ``AXES``.
        colour: Key of ``COLOURS``.
        pinned: Texts of pinned plans.
    """
    shown = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    if not shown:
        return empty("No plan has both numbers yet.")

    def trace(rows: Sequence[Mapping[str, Any]], **look: Any) -> dict[str, Any]:
        return scatter(x=[row[x] for row in rows], y=[row[y] for row in rows], **look)

    traces = []
    front = _front(shown, x, y)
    if len(front) > 1:
        line = {"color": MUTED, "dash": "dot", "width": 1.5, "shape": "hv"}
        traces.append(trace(front, mode="lines", line=line, name="Pareto front", hoverinfo="skip"))
    for number, value in enumerate(dict.fromkeys(_colour(row, colour) for row in shown)):
        points = [row for row in shown if _colour(row, colour) == value]
        marker = {
            "color": PLANS[number % len(PLANS)],
            "symbol": _SYMBOLS[number % len(_SYMBOLS)],
            "size": [13 if row["rank"] == 1 else 9 for row in points],
            "line": {"width": 1, "color": "rgba(255,255,255,0.6)"},
        }
        name, hovers = f"{COLOURS[colour]}: {value}", [[_hover(row)] for row in points]
        hover = {"customdata": hovers, "hovertemplate": "%{customdata[0]}<extra></extra>"}
        traces.append(trace(points, mode="markers", name=name, marker=marker, **hover))
    ringed = [row for row in shown if row["plan"] in set(pinned)]
    if ringed:
        ring = {"symbol": "circle-open", "size": 18, "color": MUTED, "line": {"width": 2}}
        traces.append(trace(ringed, mode="markers", name="pinned", marker=ring, hoverinfo="skip"))
    return figure(traces, height=430, xaxis=_drawn_axis(x), yaxis=_drawn_axis(y))


def _drawn_axis(name: str) -> dict[str, Any]:
    return {"title": AXES[name].label} | ({"tickformat": AXES[name].form} if name == "mfu" else {})


def _front(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[Mapping[str, Any]]:
    """Pareto front of the points; empty when an axis has no better direction."""
    less_x, less_y = AXES[x].less_is_better, AXES[y].less_is_better
    if less_x is None or less_y is None or x == y:
        return []
    sign_x, sign_y = (1 if less_x else -1), (1 if less_y else -1)
    found: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (sign_x * row[x], sign_y * row[y])):
        if not found or sign_y * row[y] < sign_y * found[-1][y]:
            found.append(row)
    return found


def _colour(row: Mapping[str, Any], colour: str) -> str:
    value = row.get(colour)
    return "pending" if value is None else str(value)


def _hover(row: Mapping[str, Any]) -> str:
    """Known numbers and options of a plan."""
    title = f"<b>{row['rank']}. {row['plan']}</b>" if row["rank"] else f"<b>{row['plan']}</b>"
    lines = [title.replace(", ", ",<br>", 2)]
    for name, axis in AXES.items():
        value = row.get(name)
        if value is not None:
            lines.append(f"{axis.label.partition(',')[0]}: {_number(value, name)}")
    others = [key for key in ("schedule", "zero_stage", "recompute", "sequence_parallel") if row.get(key) is not None]
    lines += [f"{key}: {row[key]}" for key in others]
    if row["limit"]:
        lines.append(f"bottleneck: {row['limit']}, {row['limit_share']:.0%} of the step")
    if row["help"]:
        lines.append(f"10 % more {row['help']} saves {row['help_share']:.1%}")
    return "<br>".join(lines)


def _number(value: float, name: str) -> str:
    if name == "mfu":
        return f"{value:.1%}"
    unit = AXES[name].label.partition(", ")[2]
    text = f"{value:,.2f}" if name.endswith("gib") else format_number(value)
    return f"{text} {unit}".strip()


def shares_figure(plans: Sequence[tuple[str, RankedPlan]]) -> Figure:
    """Step breakdown of each plan's critical rank, as stacked bars of the length of the step.

    Args:
        plans: Short names, and plans with explanations.
    """
    explained = [(name, plan, plan.explanation) for name, plan in plans if plan.explanation is not None]
    if not explained:
        return empty("No plan is explained yet.")
    bars = []
    for part, colour in SPLIT.items():
        key = part.replace(" ", "_")
        seconds = [why.shares.get(key, 0.0) * plan.step_time_s for _, plan, why in explained]
        if not any(seconds):
            continue
        trace = bar(
            name=part,
            orientation="h",
            y=[name for name, _, _ in explained],
            x=seconds,
            marker={"color": colour, "line": {"width": 0}},
            customdata=[[why.shares.get(key, 0.0), why.busiest_rank] for _, _, why in explained],
            hovertemplate=f"{part}: %{{x:,.4~g}} s, %{{customdata[0]:.1%}} of the step of rank %{{customdata[1]}}"
            "<extra>%{y}</extra>",
        )
        bars.append(trace)
    return figure(
        bars,
        height=90 + 26 * len(explained),
        barmode="stack",
        bargap=0.25,
        xaxis={"title": "step time, s"},
        yaxis=CATEGORIES,
    )


def space_table(space: SpaceCount) -> list[dict[str, Any]]:
    """Plans of the space by outcome, as table rows."""
    return [{"plans": number, "rule": name, "why": why} for number, name, why in space_rows(space)]


def space_figure(space: SpaceCount) -> Figure:
    """Search space by rejecting rule as bars, on a logarithmic scale, so that one plan is visible next to a million."""
    rows = [row for row in space_table(space) if row["plans"]]
    if not rows:
        return empty("No plan was evaluated yet.")
    rejected = [row["rule"] in space.rejected for row in rows]
    bars = bar(
        orientation="h",
        x=[row["plans"] for row in rows],
        y=[f"{row['rule'].replace('_', ' ')} " for row in rows],
        text=[f"{row['plans']:,}" for row in rows],
        textposition="outside",
        cliponaxis=False,
        marker={"color": [MUTED if is_rejected else PLANS[0] for is_rejected in rejected], "line": {"width": 0}},
        customdata=[[row["why"]] for row in rows],
        hovertemplate="%{x:,} plans: %{customdata[0]}<extra></extra>",
    )
    most = max(row["plans"] for row in rows)
    return figure(
        [bars],
        height=70 + 24 * len(rows),
        bargap=0.25,
        xaxis={"type": "log", "title": "plans", "dtick": 1, "range": [-0.2, math.log10(most) + 0.9]},
        yaxis=CATEGORIES,
    )


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
