"""Plans of a search: table rows, scatter plot, step breakdown and outcomes of the space; difference of two plans."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from app.figures.style import CATEGORIES, MUTED, PLANS, SPLIT, Figure, bar, empty, figure, scatter
from app.results.settings import SettingEffect
from simplan.explain import DifferenceRow
from simplan.plan.plan import ParallelPlan
from simplan.report.search import RESOURCES, alike_words, search_plan_words, space_rows
from simplan.search import RankedPlan, SearchResult, SpaceCount
from simplan.search.space import SOFTWARE_RANGES
from simplan.units import GIB, format_bytes, format_number, format_time


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
        **{key: key for key in SOFTWARE_RANGES},
    }
)
"""Fields for the color of points, by key of a row."""

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        **{key: key for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp")},
        "zero_stage": "ZeRO",
        "schedule": "schedule",
        "virtual_stages": "stages per rank",
        "microbatch_size": "microbatch",
        "recompute": "recompute",
        "recompute_layers": "recomputed blocks",
        "recompute_modules": "recomputed modules",
        "sequence_parallel": "sequence parallel",
        "cp_comm": "CP algorithm",
        "reshard_after_forward": "reshard",
        "grad_sync": "gradient reduction",
        "grad_dtype": "gradient dtype",
        "bucket_bytes": "bucket bytes",
        "stage_layers": "layers per stage",
        "offload_optimizer": "offload optimizer",
        "offload_activations": "offload activations",
        "offload_layers": "offloaded blocks",
        "collectives": "collectives",
        "placement": "placement",
        **{key: key for key in SOFTWARE_RANGES},
    }
)
"""Settings of a plan and searched options of its software: column heads by key of a row."""

_FAST_TO_SLOW = [[0.0, PLANS[0]], [0.5, PLANS[4]], [1.0, PLANS[1]]]
_LABEL_CHARS, _CHARS_ACROSS = 44, 120
_REASONS = {"memory": "needs more memory than a device has"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")


def plan_rows(result: SearchResult) -> list[dict[str, Any]]:
    """One row per plan of a search result: ranked plans first, then the others of the Pareto front.

    All rows have the same columns. Plan fields that no plan sets are left out.
    """
    ranked = [(rank, plan) for rank, plan in enumerate(result.ranked, 1)]
    others = [(None, plan) for plan in result.pareto if plan not in result.ranked]
    front = [(plan.plan, plan.software) for plan in result.pareto]
    rows = [_row(rank, plan, result, (plan.plan, plan.software) in front) for rank, plan in [*ranked, *others]]
    unset = [key for key in ParallelPlan.model_fields if all(row[key] is None for row in rows)]
    return [{key: value for key, value in row.items() if key not in unset} for row in rows]


def settings_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of ``SETTINGS`` in which a plan differs from the defaults, always with dp_shard, tp and microbatch size."""
    always = ("dp_shard", "tp", "microbatch_size")

    def is_set(key: str) -> bool:
        if key in SOFTWARE_RANGES:
            return any(key in row for row in rows)
        default = ParallelPlan.model_fields[key].default
        return any(row.get(key, default) != default for row in rows)

    return [key for key in SETTINGS if key in always or is_set(key)]


def _row(rank: int | None, plan: RankedPlan, result: SearchResult, on_front: bool) -> dict[str, Any]:
    why, best = plan.explanation, result.ranked[0]
    return {
        "rank": rank,
        "plan": search_plan_words(plan.plan, plan.software),
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
        "help_share": why.saved[why.help] if why and why.saved and why.help else None,
        "num_devices": plan.num_devices,
        "cost_dollars": plan.cost_dollars,
        "on_front": on_front,
        "alike": plan.alike.num_plans or None,
        "alike_differ_in": alike_words(plan.alike) or None,
        **plan.plan.model_dump(mode="json"),
        **plan.software,
    }


def plans_figure(
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    colour: str,
    pinned: Iterable[str] = (),
    selected: str | None = None,
) -> Figure:
    """Plans as points, with the Pareto front of the two axes as a line; pinned and selected plans have a ring.

    Args:
        rows: Rows from ``plan_rows``.
        x, y: Keys of ``AXES``.
        colour: Key of ``COLOURS``.
        pinned: Texts of pinned plans.
        selected: Text of the selected plan; None for none.

    The second value of a point's ``customdata`` is the text of its plan.
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
        name, hovers = f"{COLOURS[colour]}: {value}", [[_hover(row), row["plan"]] for row in points]
        hover = {"customdata": hovers, "hovertemplate": "%{customdata[0]}<extra></extra>"}
        traces.append(trace(points, mode="markers", name=name, marker=marker, **hover))
    for name, plans, ring in (("pinned", set(pinned), "square-open"), ("selected", {selected}, "circle-open")):
        ringed = [row for row in shown if row["plan"] in plans]
        if ringed:
            around = {"symbol": ring, "size": 18, "color": MUTED, "line": {"width": 2}}
            traces.append(trace(ringed, mode="markers", name=name, marker=around, hoverinfo="skip"))
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


def coordinates_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plans as lines over one axis per setting that differs, and over step time and memory; color is the step time.

    Args:
        rows: Rows from ``plan_rows``.
    """
    differing = [key for key in settings_of(rows) if len({str(row.get(key)) for row in rows}) > 1]
    dimensions: list[dict[str, Any]] = []
    for key in differing:
        values = [row.get(key) for row in rows]
        ordered = sorted({str(value): value for value in values}.values(), key=_order)
        texts = [str(value) for value in ordered]
        dimensions.append(
            {
                "label": SETTINGS[key],
                "values": [texts.index(str(value)) for value in values],
                "tickvals": list(range(len(texts))),
                "ticktext": texts,
                "range": [-0.1, max(1, len(texts) - 1) + 0.1],
            }
        )
    for key, label in (("device_gib", "device GiB"), ("step_time_s", "step time, s")):
        dimensions.append({"label": label, "values": [row[key] for row in rows], "tickformat": ".4~g"})
    lines = {
        "type": "parcoords",
        "dimensions": dimensions,
        "line": {"color": [row["step_time_s"] for row in rows], "colorscale": _FAST_TO_SLOW, "showscale": False},
        "labelangle": -20,
        "labelside": "top",
    }
    return figure([lines], height=430, margin={"l": 60, "r": 60, "t": 90, "b": 30})


def _order(value: Any) -> tuple[bool, float, str]:
    """Sort key of a setting's values: numbers first."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (not is_number, value if is_number else 0, str(value))


def importance_figure(effects: Sequence[SettingEffect]) -> Figure:
    """One row per setting with a point for each other value, at the change of the step time; most important first.

    Args:
        effects: From ``setting_effects``.
    """
    if not effects:
        return empty("No other value of a setting is valid.")
    spread = {one.key: 0.0 for one in effects}
    for one in effects:
        spread[one.key] = max(spread[one.key], abs(one.step_time_change))
    ordered = sorted(spread, key=lambda key: -spread[key])
    labels = _apart(effects)
    traces = []
    for name, fits, colour, symbol in (("fits", True, PLANS[0], "circle"), ("does not fit", False, PLANS[1], "x")):
        shown = [one for one in effects if (one.fits is not False) is fits]
        if not shown:
            continue
        trace = scatter(
            name=name,
            mode="markers+text",
            x=[100 * one.step_time_change for one in shown],
            y=[SETTINGS[one.key] for one in shown],
            text=[labels[one] for one in shown],
            textposition="top center",
            textfont={"size": 10},
            marker={"color": colour, "symbol": symbol, "size": 9},
            customdata=[
                [
                    format_time(one.step_time_s),
                    format_bytes(one.device_bytes),
                    f"{one.step_time_change:+.1%}",
                    written(one.value),
                ]
                for one in shown
            ],
            hovertemplate="%{y}: %{customdata[3]}<br>step time %{customdata[0]} (%{customdata[2]})<br>"
            "device memory %{customdata[1]}<extra></extra>",
        )
        traces.append(trace)
    zero = {
        "type": "line",
        "x0": 0,
        "x1": 0,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": MUTED, "dash": "dot"},
    }
    return figure(
        traces,
        height=110 + 40 * len(ordered),
        shapes=[zero],
        xaxis={"title": "change of the step time, %"},
        yaxis=CATEGORIES | {"categoryorder": "array", "categoryarray": [SETTINGS[key] for key in ordered]},
    )


def _apart(effects: Sequence[SettingEffect]) -> dict[SettingEffect, str]:
    """Labels of the points of each row; empty where a label would cover the one before it."""
    changes = [one.step_time_change for one in effects]
    per_char = (max(changes) - min(changes)) / _CHARS_ACROSS
    labels, ends = dict.fromkeys(effects, ""), dict.fromkeys((one.key for one in effects), -math.inf)
    for one in sorted(effects, key=lambda one: one.step_time_change):
        text = written(one.value)
        half = per_char * (len(text) + 1) / 2
        if one.step_time_change - half >= ends[one.key]:
            labels[one], ends[one.key] = text, one.step_time_change + half
    return labels


def written(value: Any) -> str:
    """Value of a setting as in a scenario file; empty for None."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    """Plans of the space by outcome, as table rows; the largest numbers of rejected plans first."""
    rows = [
        {"plans": number, "outcome": "rejected" if name in space.rejected else name, "reason": _REASONS.get(name, why)}
        for number, name, why in space_rows(space)
    ]
    return sorted(rows, key=lambda row: row["outcome"] != "rejected")


def space_figure(space: SpaceCount) -> Figure:
    """Search space by rejection reason as bars, on a logarithmic scale: one plan is visible next to a million."""
    rows = [row for row in space_table(space) if row["plans"]]
    if not rows:
        return empty("No plan was evaluated yet.")
    labels = ["<br>".join(textwrap.wrap(row["reason"], _LABEL_CHARS)) + " " for row in rows]
    bars = bar(
        orientation="h",
        x=[row["plans"] for row in rows],
        y=labels,
        text=[f"{row['plans']:,}" for row in rows],
        textposition="outside",
        cliponaxis=False,
        marker={"color": [MUTED if row["outcome"] == "rejected" else PLANS[0] for row in rows], "line": {"width": 0}},
        customdata=[[row["outcome"]] for row in rows],
        hovertemplate="%{x:,} plans: %{customdata[0]}<extra></extra>",
    )
    most = max(row["plans"] for row in rows)
    return figure(
        [bars],
        height=80 + sum(14 + 16 * (label.count("<br>") + 1) for label in labels),
        bargap=0.35,
        xaxis={"type": "log", "title": "plans", "dtick": 1, "range": [-0.2, math.log10(most) + 1.3]},
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
