"""One plan over an axis, value of 1 % more of each resource, and cost of a slow rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.figures.style import CATEGORIES, MUTED, PLANS, Figure, across, bar, empty, figure, scatter
from app.results.scale import DelayedRank, ScalePoint
from simplan.predict.sensitivity import MarginalValue
from simplan.prediction import training_run
from simplan.report.search import RESOURCES
from simplan.report.table import format_ranks
from simplan.units import GIB, format_number

_RESOURCES = {**RESOURCES, "compute": RESOURCES["flop_per_s"]}
_MAX_BAR_WIDTH = 0.12  # fraction of the axis, for a few bars


def scale_rows(
    points: Sequence[ScalePoint], budget: float | None = None, price: float | None = None
) -> list[dict[str, Any]]:
    """One row per point with a prediction.

    Args:
        points: Points from ``sweep``.
        budget: Number of tokens (or images) to train on, for the cost; None for no cost.
        price: Price per device and hour; None for no cost.
    """
    rows = []
    for point in points:
        if point.refused:
            continue
        rate = point.tokens_per_s or point.samples_per_s
        row = {
            "value": point.value,
            "devices": point.num_devices,
            "step_time_s": point.step_time_s,
            "low_s": point.step_time_interval_s[0],
            "high_s": point.step_time_interval_s[1],
            "per_s": rate,
            "device_gib": point.device_bytes / GIB,
            "fits": point.fits,
        }
        if budget is not None and price is not None:
            run = training_run(
                budget,
                point.step_time_s,
                None,
                tokens_per_step=round(rate * point.step_time_s),
                num_devices=point.num_devices,
                price_per_device_hour=price,
            )
            row["cost"] = run.cost
        rows.append(row)
    return rows


def scale_figures(
    rows: Sequence[dict[str, Any]], label: str, now: float, capacity_bytes: int | None, *, unit: str = "tokens"
) -> dict[str, Figure]:
    """Figures by name: step time with interval, throughput, memory, and cost if known, over one axis.

    Args:
        rows, label: Rows from ``scale_rows``, and name of the axis.
        now: Value of the scenario on the axis.
        capacity_bytes: Memory of a device in bytes; None when unknown.
        unit: Unit of throughput, ``tokens`` or images.
    """
    if not rows:
        return {"nothing": empty("No point of this axis can be predicted.")}
    step_time = [_interval(rows), _curve(rows, "step_time_s", "step time, s", label, now)]
    found = {"step time": _panel(step_time, rows, label, "step time, s")}
    rate = f"{unit} per second, all devices"
    throughput = [_curve(rows, "per_s", rate, label, now)]
    ideal = _ideal(rows, now) if label == "devices" else []
    if ideal:
        line = {"color": MUTED, "dash": "dot", "width": 1.5}
        x = [row["value"] for row in rows]
        throughput.append(scatter(x=x, y=ideal, mode="lines", name="linear scaling", line=line, hoverinfo="skip"))
    found["throughput"] = _panel(throughput, rows, label, rate)
    words = "peak device memory, GiB"
    capacity = [] if capacity_bytes is None else [across(capacity_bytes / GIB, {"color": MUTED, "dash": "dash"})]
    found["memory"] = _panel([_curve(rows, "device_gib", words, label, now)], rows, label, words, shapes=capacity)
    if "cost" in rows[0]:
        title = "cost of the budget"
        found["cost"] = _panel([_curve(rows, "cost", title, label, now)], rows, label, title)
    return found


def _panel(
    traces: list[dict[str, Any]], rows: Sequence[dict[str, Any]], label: str, title: str, **layout: Any
) -> Figure:
    x = [row["value"] for row in rows]
    ticks = {"tickvals": x, "ticktext": [format_number(value) for value in x], "tickangle": 0}
    xaxis = {"type": "log", "title": label, **ticks}
    above = {"x": 0.5, "xref": "paper", "xanchor": "center", "y": 1.0, "yref": "paper", "yanchor": "bottom"}
    note = {"text": title, "showarrow": False, "font": {"size": 13}, **above}
    axes = {"xaxis": xaxis, "yaxis": {"rangemode": "tozero"}}
    return figure(traces, height=310, margin={"t": 60}, legend={"y": 1.12}, annotations=[note], **axes, **layout)


def _interval(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """90 % interval of the step time."""
    x = [row["value"] for row in rows]
    return scatter(
        x=[*x, *reversed(x)],
        y=[*(row["high_s"] for row in rows), *(row["low_s"] for row in reversed(rows))],
        fill="toself",
        fillcolor="rgba(59,125,216,0.15)",
        mode="lines",  # points of its outline are no predictions
        line={"width": 0},
        hoverinfo="skip",
        name="90 % interval",
    )


def _curve(rows: Sequence[dict[str, Any]], key: str, title: str, label: str, now: float) -> dict[str, Any]:
    """A quantity over the axis: a larger point at the scenario's value, a cross for plans that do not fit."""
    fit = [row["fits"] is not False for row in rows]
    return scatter(
        x=[row["value"] for row in rows],
        y=[row[key] for row in rows],
        mode="lines+markers",
        name=title,
        showlegend=False,
        line={"color": PLANS[0], "width": 2},
        marker={
            "size": [11 if row["value"] == now else 8 for row in rows],
            "symbol": ["circle" if one else "x" for one in fit],
            "color": [PLANS[0] if one else PLANS[1] for one in fit],
        },
        customdata=[[label, "" if one else "<br>does not fit"] for one in fit],
        hovertemplate=f"%{{customdata[0]}} %{{x:,.4~g}}: {title} %{{y:,.4~g}}%{{customdata[1]}}<extra></extra>",
    )


def _ideal(rows: Sequence[dict[str, Any]], now: float) -> list[float]:
    """Throughput proportional to the number of devices, from the scenario's value."""
    here = next((row for row in rows if row["value"] == now), None)
    return [] if here is None else [here["per_s"] * row["value"] / now for row in rows]


def worth_figure(values: Sequence[MarginalValue]) -> Figure:
    """Step time saved by one percent more of each resource, as bars."""
    shown = [value for value in values if value.relative_change < 0]
    if not shown:
        return empty("No resource changes the step time.")
    bars = bar(
        orientation="h",
        x=[-100 * value.relative_change for value in shown],
        y=[f"{_RESOURCES[value.resource]} " for value in shown],
        text=[f"{-100 * value.relative_change:.3f} %" for value in shown],
        textposition="outside",
        cliponaxis=False,
        marker={"color": PLANS[0]},
        hovertemplate="1 % more %{y}: a step is %{x:.4f} % shorter<extra></extra>",
    )
    most = max(-100 * value.relative_change for value in shown)
    return figure(
        [bars],
        height=80 + 34 * len(shown),
        bargap=0.3,
        xaxis={"title": "step time saved by 1 % more, %", "range": [0, 1.25 * most]},
        yaxis=CATEGORIES,
    )


def slow_figure(found: Sequence[DelayedRank], slower: float) -> Figure:
    """Step time increase per slow rank, in percent; the dashed line is the delay of the rank's compute."""
    labels = [f"{format_ranks(list(one.ranks))} " for one in found]
    bars = bar(
        x=labels,
        y=[100 * one.relative_change for one in found],
        marker={"color": PLANS[1]},
        hovertemplate="rank %{x}: a step is %{y:.2f} % longer<extra></extra>",
    )
    return figure(
        [bars],
        height=260,
        bargap=max(0.3, 1 - _MAX_BAR_WIDTH * len(found)),
        shapes=[across(100 * slower, {"color": MUTED, "dash": "dash"})],
        xaxis={"title": "slow rank, with identical ranks", "type": "category"},
        yaxis={"title": "step time increase, %", "rangemode": "tozero"},
    )
