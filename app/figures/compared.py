"""Plans next to each other as stacked bars: peak memory by category, and the step by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.figures.plan import MEMORY_COLOURS, memory_bars
from app.figures.style import CAPACITY, MUTED, SPLIT, Figure, bar, empty, figure, scatter, time_unit
from app.results.compared import ComparedPlan
from simplan.units import GIB, format_bytes, format_time

_HEIGHT_PX = 430  # a legend in one column, on a phone, takes up to half of it
_NOTHING = "None of these plans has a prediction."


def memory_stacks(plans: Sequence[ComparedPlan], title: str, chosen: str = "") -> Figure:
    """Memory of each plan's peak-memory rank by category, with the capacity of its devices as a dashed line.

    Args:
        plans: Plans; refused ones have no bar.
        title: Title of the x axis.
        chosen: Name of the plan to emphasize; empty for none.
    """
    shown = [(plan, memory_bars([plan.memory])[0]) for plan in plans if plan.memory is not None]
    if not shown:
        return empty(_NOTHING)
    traces = []
    for part in dict.fromkeys([*MEMORY_COLOURS, *(part for _, one in shown for part in one.parts)]):
        values = [one.parts.get(part, 0) for _, one in shown]
        if not any(values):
            continue
        look = {"color": MEMORY_COLOURS.get(part, MUTED), "line": {"width": 0}}
        if part not in MEMORY_COLOURS:
            look["pattern"] = {"shape": "/", "size": 5, "solidity": 0.25}
        traces.append(
            bar(
                name=part,
                x=[plan.name for plan, _ in shown],
                y=[value / GIB for value in values],
                marker=look,
                customdata=[
                    [format_bytes(value), format_bytes(one.device_bytes)]
                    for value, (_, one) in zip(values, shown, strict=True)
                ],
                hovertemplate=f"<b>{part}</b> %{{customdata[0]}} of %{{customdata[1]}}<extra>%{{x}}</extra>",
            )
        )
    names = [plan.name for plan, _ in shown]
    limits = [None if plan.headline is None else plan.headline.capacity_bytes for plan, _ in shown]
    lines = [
        {"type": "line", "x0": place - 0.42, "x1": place + 0.42, "y0": limit / GIB, "y1": limit / GIB, "line": CAPACITY}
        for place, limit in enumerate(limits)
        if limit is not None
    ]
    if lines:
        traces.append(scatter(x=[None], y=[None], mode="lines", line=CAPACITY, name="device memory"))  # for the legend
    heads = [plan.headline for plan, _ in shown if plan.headline is not None]
    traces.append(
        _spread(
            names,
            [head.device_bytes / GIB for head in heads],
            [(low / GIB, high / GIB) for low, high in (head.device_interval_bytes for head in heads)],
            [" to ".join(map(format_bytes, head.device_interval_bytes)) for head in heads],
        )
    )
    most = max([head.device_interval_bytes[1] for head in heads] + [limit or 0 for limit in limits])
    return _stacks(traces, names, title, "GiB at the peak", chosen, most / GIB, shapes=lines)


def step_stacks(plans: Sequence[ComparedPlan], title: str, chosen: str = "") -> Figure:
    """Step of each plan by part, with the 90 % interval of the step time.

    Args:
        plans: Plans; refused ones have no bar.
        title: Title of the x axis.
        chosen: Name of the plan to emphasize; empty for none.
    """
    shown = [(plan, plan.headline) for plan in plans if plan.headline is not None]
    if not shown:
        return empty(_NOTHING)
    names = [plan.name for plan, _ in shown]
    unit, unit_s = time_unit(max(headline.step_time_s for _, headline in shown))
    traces = []
    for part, colour in SPLIT.items():
        seconds = [plan.split_s.get(part, 0.0) for plan, _ in shown]
        if not any(seconds):
            continue
        traces.append(
            bar(
                name=part,
                x=names,
                y=[one_s / unit_s for one_s in seconds],
                marker={"color": colour, "line": {"width": 0}},
                customdata=[
                    [format_time(one_s), f"{one_s / headline.step_time_s:.1%}", format_time(headline.step_time_s)]
                    for one_s, (_, headline) in zip(seconds, shown, strict=True)
                ],
                hovertemplate=f"<b>{part}</b> %{{customdata[0]}}, %{{customdata[1]}} of %{{customdata[2]}}"
                "<extra>%{x}</extra>",
            )
        )
    limits_s = [headline.step_time_interval_s or (headline.step_time_s,) * 2 for _, headline in shown]
    traces.append(
        _spread(
            names,
            [headline.step_time_s / unit_s for _, headline in shown],
            [(low_s / unit_s, high_s / unit_s) for low_s, high_s in limits_s],
            [" to ".join(map(format_time, limits)) for limits in limits_s],
        )
    )
    most_s = max(high_s for _, high_s in limits_s)
    return _stacks(traces, names, title, f"step time, {unit}", chosen, most_s / unit_s)


def _spread(
    names: Sequence[str], values: Sequence[float], limits: Sequence[tuple[float, float]], words: Sequence[str]
) -> dict[str, Any]:
    """90 % intervals as lines through the tops of the bars."""
    error = {
        "type": "data",
        "symmetric": False,
        "array": [high - value for value, (_, high) in zip(values, limits, strict=True)],
        "arrayminus": [value - low for value, (low, _) in zip(values, limits, strict=True)],
        "color": MUTED,
        "thickness": 1.5,
    }
    return scatter(
        x=list(names),
        y=list(values),
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
    return figure(
        traces,
        height=_HEIGHT_PX,
        barmode="stack",
        bargap=0.35,
        xaxis={
            "title": x,
            "type": "category",
            "showgrid": False,
            "range": [-0.5, len(names) - 0.5],
            "tickvals": list(names),
            "ticktext": words,
        },
        yaxis={"title": y, "range": [0, 1.06 * most]},
        **layout,
    )
