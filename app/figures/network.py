"""Figures of the page Network: load of links over a step, cost of slow links, and step times of alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.figures.style import CATEGORIES, GRID, MUTED, PLANS, Figure, bar, empty, figure, time_unit
from app.results.network import Alternative, SlowLinkCost
from simplan.network.load import LinkLoad
from simplan.report.drawings.link_load import LoadRow, load_color
from simplan.units import format_bytes, format_percent, format_rate, format_time

_SHADES = [[0.0, GRID], *([share, load_color(share)] for share in (0.02, 0.25, 0.5, 0.75, 1.0))]
_COLORBAR = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1,
    "yanchor": "bottom",
    "len": 0.4,
    "thickness": 10,
    "tickformat": ".0%",
    "tickvals": [0, 0.5, 1],
    "outlinewidth": 0,
}
_MAX_NAME = 34
_MAX_NAMED = 3


def load_figure(rows: Sequence[LoadRow], length_s: float, chosen: str) -> Figure:
    """Busy share of links over a step as a heat map, and its mean as bars.

    Args:
        rows: Links, one row for those of equal load.
        length_s: Length of the simulated step in seconds.
        chosen: Name of the chosen link.
    """
    if not rows:
        return empty("No link has traffic.")
    unit, unit_s = time_unit(length_s)
    num = len(rows[0].link.series)
    starts = [length_s * (place + 0.5) / num / unit_s for place in range(num)]
    names = [_row_name(row) for row in rows]
    hovers = [_hover(row.link) for row in rows]
    cells = {
        "type": "heatmap",
        "x": starts,
        "y": names,
        "z": [[min(1.0, share) for share in row.link.series] for row in rows],
        "customdata": [[hover] * num for hover in hovers],
        "hovertemplate": f"%{{z:.0%}} busy at %{{x:,.4~g}} {unit}<br>%{{customdata}}<extra></extra>",
        "zmin": 0,
        "zmax": 1,
        "colorscale": _SHADES,
        "ygap": 2,
        "colorbar": _COLORBAR,
    }
    means = bar(
        orientation="h",
        xaxis="x2",
        x=[row.link.busy_share for row in rows],
        y=names,
        marker={"color": [PLANS[1] if row.link.name == chosen else PLANS[0] for row in rows]},
        customdata=[[hover, row.link.name] for hover, row in zip(hovers, rows, strict=True)],
        hovertemplate="mean %{x:.1%} busy<br>%{customdata[0]}<extra></extra>",
        showlegend=False,
    )
    ends = [0, max(row.link.busy_share for row in rows)]
    return figure(
        [cells, means],
        height=140 + 24 * len(rows),
        bargap=0.25,
        xaxis={"title": f"time in the step, {unit}", "domain": [0, 0.78], "showgrid": False},
        xaxis2={"title": "mean", "domain": [0.82, 1], "anchor": "y", "tickformat": ".0%", "tickvals": ends},
        yaxis=CATEGORIES,
    )


def _row_name(row: LoadRow) -> str:
    name = row.link.name
    name = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"
    return f"{name} +{row.num_links - 1} " if row.num_links > 1 else f"{name} "


def _hover(link: LinkLoad) -> str:
    """Name, bandwidth, bytes, delays, and the communications that keep the link busy longest."""
    busiest = sorted(link.communications, key=lambda part: -part.busy_s)
    lines = [
        f"{link.name}, {format_rate(link.bytes_per_s)}",
        f"{format_bytes(link.num_bytes)} a step, {format_percent(link.busy_share)} busy in the mean",
        *(f"{format_time(part.busy_s)}: {part.name}" for part in busiest[:_MAX_NAMED]),
    ]
    if len(busiest) > _MAX_NAMED:
        lines.append(f"and {len(busiest) - _MAX_NAMED} more")
    if link.lost_s > 0:
        lines.append(f"delays communications by {format_time(link.lost_s)}, all groups of ranks together")
    return "<br>".join(lines)


def slow_links_figure(costs: Sequence[SlowLinkCost], step_time_s: float) -> Figure:
    """Step time increase with one slow link of each kind, in percent."""
    percents = [100 * (cost.step_time_s / step_time_s - 1) for cost in costs]
    bars = bar(
        orientation="h",
        x=percents,
        y=[f"{cost.kind} " for cost in costs],
        text=[f"{percent:+.2f} %" for percent in percents],
        textposition="outside",
        cliponaxis=False,
        marker={"color": PLANS[1]},
        customdata=[[cost.link, format_rate(cost.bytes_per_s)] for cost in costs],
        hovertemplate="%{customdata[0]} (%{customdata[1]}): a step is %{x:.2f} % longer<extra></extra>",
    )
    axis = {"title": "step time increase, %", "range": [0, 1.25 * max(*percents, 0.1)]}
    return figure([bars], height=80 + 30 * len(costs), bargap=0.3, xaxis=axis, yaxis=CATEGORIES)


def alternatives_figure(found: Sequence[Alternative], current_s: float) -> Figure:
    """Step time with each value of a setting, and its change; a line at the step time of the scenario."""
    timed = [(one, one.step_time_s) for one in found if one.step_time_s is not None]
    if not timed:
        return empty("No value of this setting can be predicted.")
    unit, unit_s = time_unit(current_s)
    bars = bar(
        orientation="h",
        x=[time_s / unit_s for _, time_s in timed],
        y=[f"{one.name} " for one, _ in timed],
        text=[_change(time_s, current_s) for _, time_s in timed],
        textposition="outside",
        cliponaxis=False,
        marker={"color": [PLANS[1] if one.is_current else PLANS[0] for one, _ in timed]},
        customdata=[[one.words, format_time(time_s)] for one, time_s in timed],
        hovertemplate="%{y}: %{customdata[1]} %{customdata[0]}<extra></extra>",
    )
    line: dict[str, Any] = {
        "type": "line",
        "xref": "x",
        "yref": "y domain",
        "x0": current_s / unit_s,
        "x1": current_s / unit_s,
        "y0": 0,
        "y1": 1,
        "line": {"color": MUTED, "dash": "dash"},
    }
    most = max(time_s for _, time_s in timed) / unit_s
    axis = {"title": f"step time, {unit}", "range": [0, 1.3 * most]}
    return figure([bars], height=80 + 30 * len(timed), bargap=0.3, shapes=[line], xaxis=axis, yaxis=CATEGORIES)


def _change(time_s: float, current_s: float) -> str:
    change = time_s / current_s - 1
    return f"{change:+.1%}" if abs(change) >= 5e-4 else format_time(time_s)
