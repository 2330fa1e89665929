"""Predictions compared with measurements: published runs, errors by source, errors by term, both steps on one axis."""

from __future__ import annotations

from collections.abc import Sequence

from app.figures.style import (
    ACTIONS,
    CATEGORIES,
    COMMUNICATION,
    MUTED,
    PLANS,
    Figure,
    across,
    bar,
    empty,
    figure,
    scatter,
)
from simplan.program.action import Action, ActionKind
from simplan.program.timeline import Span, Timeline
from simplan.report.drawings.accuracy_plot import AccuracyPlot, time_ticks
from simplan.units import format_number
from simplan.validate.rows import ComparisonRow

_MAX_BARS = 4_000
_NOTHING = "No step time was both measured and predicted."


def runs_figure(plot: AccuracyPlot | None) -> Figure:
    """Predicted over measured step times of published runs, with one trace per source and the diagonal."""
    if plot is None:
        return empty(_NOTHING)
    both = [seconds for point in plot.points for seconds in (point.measured_s, point.predicted_s)]
    ends = (min(both) / 1.3, max(both) * 1.3)
    line = {"color": MUTED, "dash": "dot", "width": 1.5}
    traces = [scatter(x=ends, y=ends, mode="lines", line=line, name="equal", hoverinfo="skip")]
    for number, panel in enumerate(plot.panels):
        trace = scatter(
            x=[point.measured_s for point in panel.points],
            y=[point.predicted_s for point in panel.points],
            mode="markers",
            name=panel.name,
            marker={
                "color": PLANS[number % len(PLANS)],
                "size": 7,
                "opacity": 0.75,
                "symbol": ["circle" if point.in_interval else "x" for point in panel.points],
            },
            customdata=[
                [point.id, f"{point.ratio - 1:+.1%}", "yes" if point.in_interval else "no"] for point in panel.points
            ],
            hovertemplate="%{customdata[0]}<br>measured %{x:,.4~g} s, predicted %{y:,.4~g} s: %{customdata[1]}"
            "<br>in the interval: %{customdata[2]}<extra></extra>",
        )
        traces.append(trace)
    values = time_ticks(*ends)
    ticks = {"tickvals": values, "ticktext": [format_number(value) for value in values]}
    x, y = ({"type": "log", "title": f"{word} step, s", **ticks} for word in ("measured", "predicted"))
    return figure(traces, height=430, xaxis=x, yaxis=y)


def errors_figure(plot: AccuracyPlot | None) -> Figure:
    """Errors of the runs by source: box plots with one point per run."""
    if plot is None:
        return empty(_NOTHING)
    boxes = [
        {
            "type": "box",
            "y": [100 * (point.ratio - 1) for point in panel.points],
            "name": panel.name,
            "text": [point.id for point in panel.points],
            "boxpoints": "all",
            "jitter": 0.4,
            "pointpos": 0,
            "marker": {"color": PLANS[number % len(PLANS)], "size": 4, "opacity": 0.6},
            "hovertemplate": "%{text}: %{y:+.1f} %<extra></extra>",
        }
        for number, panel in enumerate(plot.panels)
    ]
    exact = across(0, {"color": MUTED, "dash": "dot"})
    axis = {"title": "error, %", "ticksuffix": " %"}
    return figure(boxes, height=430, showlegend=False, shapes=[exact], yaxis=axis)


def terms_figure(rows: Sequence[ComparisonRow]) -> Figure:
    """Signed errors as bars, over the spread of the repeats around zero."""
    shown = [row for row in rows if row.signed_error is not None]
    if not shown:
        return empty("No term was both measured and predicted.")
    spreads = [100 * (row.spread or 0.0) for row in shown]
    names = [f"{row.name} " for row in shown]
    repeats = bar(
        orientation="h",
        name="spread of the repeats",
        x=[2 * spread for spread in spreads],
        base=[-spread for spread in spreads],
        y=names,
        marker={"color": "rgba(138,143,152,0.3)"},
        width=0.8,
        hoverinfo="skip",
    )
    errors = bar(
        orientation="h",
        name="error",
        x=[100 * (row.signed_error or 0.0) for row in shown],
        y=names,
        width=0.4,
        marker={"color": [MUTED if row.within_spread else PLANS[0] for row in shown]},
        customdata=[
            [f"{format_number(row.predicted)} {row.unit}", f"{format_number(row.measured)} {row.unit}"] for row in shown
        ],
        hovertemplate="%{y}: predicted %{customdata[0]}, measured %{customdata[1]}: %{x:+.1f} %<extra></extra>",
    )
    return figure(
        [repeats, errors],
        height=90 + 26 * len(shown),
        barmode="overlay",
        xaxis={"title": "%"},
        yaxis=CATEGORIES,
    )


def steps_figure(predicted: Timeline, measured: Timeline) -> Figure:
    """Predicted and measured step on one axis, two rows per rank."""
    ranks = sorted({span.rank for span in (*predicted.spans, *measured.spans)})
    boxes: dict[str, list[tuple[str, Span]]] = {}
    for words, timeline in (("predicted", predicted), ("measured", measured)):
        for span in timeline.spans:
            boxes.setdefault(_kind(span), []).append((f"rank {span.rank} {words}", span))
    traces, left = [], _MAX_BARS
    for kind, found in boxes.items():
        shown = found[: max(0, left)]
        left -= len(shown)
        trace = bar(
            orientation="h",
            name=kind,
            base=[span.start_s * 1e3 for _, span in shown],
            x=[(span.end_s - span.start_s) * 1e3 for _, span in shown],
            y=[row for row, _ in shown],
            width=[0.25 if kind == "communication" else 0.8 for _ in shown],
            marker={"color": _colour(kind), "line": {"width": 0.4, "color": "rgba(120,128,140,0.6)"}},
            customdata=[[span.name, span.stream] for _, span in shown],
            hovertemplate="%{customdata[0]} (%{customdata[1]}): %{x:,.4~g} ms from %{base:,.4~g} ms<extra>%{y}</extra>",
        )
        traces.append(trace)
    order = [f"rank {rank} {words}" for rank in ranks for words in ("predicted", "measured")]
    return figure(
        traces,
        height=120 + 34 * len(order),
        barmode="overlay",
        xaxis={"title": "ms from the start of the step"},
        yaxis={"categoryorder": "array", "categoryarray": order[::-1], "type": "category"},
    )


def _kind(span: Span) -> str:
    if span.stream != "compute":
        return "communication"
    return Action.parse(span.action).kind.name.lower().replace("_", " ")


def _colour(kind: str) -> str:
    if kind == "communication":
        return COMMUNICATION
    return ACTIONS.get(ActionKind[kind.upper().replace(" ", "_")], MUTED)
