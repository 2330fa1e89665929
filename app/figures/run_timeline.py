"""Figure of the timeline of one simulated run; its data is that of ``simplan draw --run``."""

from __future__ import annotations

from typing import Any

from app.figures.style import MUTED, Figure, bar, figure, scatter
from simplan.report.drawings.goodput_svg import COLOURS
from simplan.report.drawings.run_timeline import RunTimeline, kinds_of, row_figures
from simplan.report.goodput import PARTS
from simplan.units import format_percent, format_span

COLUMNS = 480
"""Columns of a row."""
_ROW_PX, _AROUND_PX = 18, 110


def run_timeline_figure(timeline: RunTimeline) -> Figure:
    """A row for each minute, hour, day or week of the run, the first on top; triangles are stops."""
    length = timeline.row_length
    rows = list(row_figures(timeline))
    segments = timeline.segments(COLUMNS)
    traces: list[dict[str, Any]] = []
    for kind in kinds_of(segments):
        of_kind = [segment for segment in segments if segment.kind == kind]
        words = [
            [format_span(part.seconds), format_span(part.row * length.length_s + part.start_s)] for part in of_kind
        ]
        traces.append(
            bar(
                orientation="h",
                name=PARTS[kind],
                base=[part.start_s / length.unit_s for part in of_kind],
                x=[(part.end_s - part.start_s) / length.unit_s for part in of_kind],
                y=[part.row for part in of_kind],
                width=0.72,
                marker={"color": COLOURS[kind], "line": {"width": 0}},
                customdata=words,
                hovertemplate=f"<b>{PARTS[kind]}</b> %{{customdata[0]}}<br>after %{{customdata[1]}}<extra></extra>",
            )
        )
    if timeline.stops:
        places = [divmod(stop.at_s, length.length_s) for stop in timeline.stops]
        traces.append(
            scatter(
                mode="markers",
                name="stop",
                x=[at_s / length.unit_s for _, at_s in places],
                y=[row - 0.42 for row, _ in places],
                marker={"symbol": "triangle-down", "size": 7, "color": MUTED},
                customdata=[[stop.cause, format_span(stop.at_s), f"{stop.step:,.0f}"] for stop in timeline.stops],
                hovertemplate="<b>%{customdata[0]}</b> after %{customdata[1]}<br>"
                "goes on from step %{customdata[2]}<extra></extra>",
            )
        )
    ends = [f"{name}, {format_percent(done, 0)}" for name, _, done in rows]
    return figure(
        traces,
        height=_AROUND_PX + _ROW_PX * len(rows),
        barmode="overlay",
        hovermode="closest",
        dragmode="zoom",
        xaxis={
            "range": [0, length.length_s / length.unit_s],
            "tickvals": [at_s / length.unit_s for at_s, _ in length.ticks],
            "title": f"time in the {length.name}, {length.unit}",
        },
        yaxis={
            "range": [len(rows) - 0.4, -0.7],
            "tickvals": list(range(len(rows))),
            "ticktext": ends,
            "showgrid": False,
            "tickfont": {"size": 11},
        },
    )
