"""One plan over more or less of something; what a little more is worth, and what a slow rank costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.figures.style import empty, styled
from app.palette import MUTED, PLANS
from app.results.scale import Point, SlowRank
from simplan.predict.sensitivity import MarginalValue
from simplan.report.table import format_ranks
from simplan.units import GIB

__all__ = ["scale_figure", "scale_rows", "slow_figure", "worth_figure"]

_HOUR_S = 3600.0
_RESOURCES = {
    "compute": "FLOP/s",
    "memory_bandwidth": "memory bandwidth",
    "intra_link": "bandwidth within nodes",
    "inter_link": "bandwidth between nodes",
}


def scale_rows(
    points: Sequence[Point], budget: float | None = None, price: float | None = None
) -> list[dict[str, Any]]:
    """A row for each point that has an answer.

    Args:
        points: From ``sweep``.
        budget: Tokens (images, of models of them) to train on, for the cost.
        price: Per device and hour.
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
            row["cost"] = budget / rate / _HOUR_S * point.num_devices * price
        rows.append(row)
    return rows


def scale_figure(
    rows: Sequence[dict[str, Any]], label: str, now: float, capacity_bytes: int | None, *, unit: str = "tokens"
) -> go.Figure:
    """Panels beside each other over one axis: step time with its interval, throughput, memory, and cost if it is known.

    Args:
        rows: From ``scale_rows``.
        label: What the axis is.
        now: Where the scenario stands on it.
        capacity_bytes: Of a device; None when unknown.
        unit: What throughput counts.
    """
    if not rows:
        return empty("Nothing on this axis has an answer.")
    panels = [("step_time_s", "step time, s"), ("per_s", f"{unit} per second, all devices")]
    panels += [("device_gib", "device memory of the worst rank, GiB")]
    panels += [("cost", "cost of the budget")] if "cost" in rows[0] else []
    figure = make_subplots(1, len(panels), subplot_titles=[title for _, title in panels], horizontal_spacing=0.06)
    x = [row["value"] for row in rows]
    fit = [row["fits"] is not False for row in rows]
    for column, (key, title) in enumerate(panels, 1):
        if key == "step_time_s":
            figure.add_scatter(
                x=[*x, *reversed(x)],
                y=[*(row["high_s"] for row in rows), *(row["low_s"] for row in reversed(rows))],
                fill="toself",
                fillcolor="rgba(59,125,216,0.15)",
                mode="lines",  # points of its outline are no predictions
                line={"width": 0},
                hoverinfo="skip",
                name="9 of 10 cases",
                row=1,
                col=column,
            )
        figure.add_scatter(
            x=x,
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
            row=1,
            col=column,
        )
        if key == "device_gib" and capacity_bytes is not None:
            figure.add_hline(capacity_bytes / GIB, line={"color": MUTED, "dash": "dash"}, row=1, col=column)
    ideal = _ideal(rows, now) if label == "devices" else []
    if ideal:
        line = {"color": MUTED, "dash": "dot", "width": 1.5}
        figure.add_scatter(x=x, y=ideal, mode="lines", name="in proportion", line=line, hoverinfo="skip", row=1, col=2)
    styled(figure, height=330, margin={"l": 8, "r": 8, "t": 60, "b": 8})
    figure.update_layout(legend={"y": 1.14})
    ticks = [f"{value:,.4g}" for value in x]
    figure.update_xaxes(type="log", tickvals=x, ticktext=ticks, title_text=label.partition(",")[0], tickangle=0)
    figure.update_yaxes(rangemode="tozero")
    figure.update_annotations(font={"size": 13})
    return figure


def _ideal(rows: Sequence[dict[str, Any]], now: float) -> list[float]:
    """Throughput in proportion to the devices, from where the scenario stands."""
    here = next((row for row in rows if row["value"] == now), None)
    return [] if here is None else [here["per_s"] * row["value"] / now for row in rows]


def worth_figure(values: Sequence[MarginalValue]) -> go.Figure:
    """What one percent more of each resource saves, as bars."""
    shown = [value for value in values if value.relative_change < 0]
    if not shown:
        return empty("One percent more of anything changes nothing.")
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        x=[-100 * value.relative_change for value in shown],
        y=[f"{_RESOURCES[value.resource]} " for value in shown],
        text=[f"{-100 * value.relative_change:.3f} %" for value in shown],
        textposition="outside",
        cliponaxis=False,
        marker={"color": PLANS[0]},
        hovertemplate="1 % more %{y}: a step is %{x:.4f} % shorter<extra></extra>",
    )
    styled(figure, height=80 + 34 * len(shown), bargap=0.3, xaxis_title="% of the step that 1 % more saves")
    figure.update_xaxes(range=[0, 1.25 * max(-100 * value.relative_change for value in shown)])
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return figure


def slow_figure(found: Sequence[SlowRank], slower: float) -> go.Figure:
    """How much longer the step takes by slow rank; the dashed line is the rank's own delay."""
    figure = go.Figure()
    labels = [f"{format_ranks(list(one.ranks))} " for one in found]
    figure.add_bar(
        x=labels,
        y=[100 * one.relative_change for one in found],
        marker={"color": PLANS[1]},
        hovertemplate="rank %{x}: a step is %{y:.2f} % longer<extra></extra>",
    )
    figure.add_hline(100 * slower, line={"color": MUTED, "dash": "dash"})
    styled(figure, height=260, bargap=0.3, xaxis_title="the slow rank, and those that do the same")
    figure.update_yaxes(title_text="% longer step", rangemode="tozero")
    figure.update_xaxes(type="category")
    return figure
