"""A schedule that plays: a box for each action, step by step, with buttons and a slider that need no server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from app.figures.gantt import shade
from app.figures.style import Figure, bar, figure, scatter
from app.palette import ACTIONS, MUTED
from app.results.lesson import Lesson, LessonBox
from simplan.program.action import ActionKind
from simplan.report.drawings.drawing_labels import WORDS
from simplan.report.drawings.drawing_svg import ink_on

__all__ = ["lesson_figure"]

_ROW_PX, _AROUND_PX = 42, 215
_MOST_FRAMES = 120
_FRAME_MS = 320


def lesson_figure(one: Lesson) -> Figure:
    """The whole step; playing it draws it from its beginning.

    Args:
        one: The schedule.
    """
    groups = _groups(one)
    instants = _instants(one.length)
    whole = figure(
        [*_bars(one, groups), _now(one)],
        height=_AROUND_PX + _ROW_PX * one.num_ranks,
        barmode="overlay",
        bargap=0,
        uniformtext={"minsize": 8, "mode": "hide"},
        margin={"t": 40, "r": 110},
        updatemenus=[_buttons()],
        sliders=[_slider(instants)],
        xaxis={"title": "time, forwards", "range": [0, one.length * 1.002], "showgrid": True},
        yaxis={
            "tickvals": list(range(one.num_ranks)),
            "ticktext": [f"rank {rank}" for rank in range(one.num_ranks)],
            "range": [one.num_ranks - 0.5, -0.5],
            "showgrid": False,
            "fixedrange": True,
        },
        **_notes(one, one.length),
    )
    frames = [
        {"name": f"{time:g}", "data": _until(one, groups, time), "layout": _notes(one, time)} for time in instants
    ]
    return whole | {"frames": frames}


_Group = tuple[ActionKind, int, list[LessonBox]]


def _groups(one: Lesson) -> list[_Group]:
    """Boxes of one kind and one of the rank's stages, of which each has a shade."""
    stages = [sorted({box.action.stage for box in one.boxes if box.rank == rank}) for rank in range(one.num_ranks)]
    found: dict[tuple[ActionKind, int], list[LessonBox]] = {}
    for box in one.boxes:
        found.setdefault((box.action.kind, stages[box.rank].index(box.action.stage)), []).append(box)
    order = list(ActionKind)
    return [
        (kind, place, boxes)
        for (kind, place), boxes in sorted(found.items(), key=lambda i: (order.index(i[0][0]), i[0][1]))
    ]


def _until(one: Lesson, groups: Sequence[_Group], time: float) -> list[dict[str, object]]:
    """Traces of an animation frame: boxes up to its time, and a line at its time."""
    several = one.virtual_stages > 1
    bars: list[dict[str, object]] = [
        {
            "type": "bar",
            "x": [max(0.0, min(box.end, time) - box.start) for box in boxes],
            "text": [_text(box, several=several) if box.start < time else "" for box in boxes],
        }
        for _, _, boxes in groups
    ]
    return [*bars, {"type": "scatter", "x": [time, time]}]


def _bars(one: Lesson, groups: Sequence[_Group]) -> list[dict[str, Any]]:
    """The whole step."""
    bars = []
    for kind, place, boxes in groups:
        fill = shade(ACTIONS.get(kind, MUTED), place, one.virtual_stages)
        several = one.virtual_stages > 1
        bars.append(
            bar(
                name=WORDS[kind] + (f", stage {place + 1} of a rank" if several else ""),
                orientation="h",
                y=[box.rank for box in boxes],
                base=[box.start for box in boxes],
                x=[box.end - box.start for box in boxes],
                width=0.78,
                offset=-0.39,
                marker={"color": fill, "line": {"width": 0.8, "color": "rgba(120,128,140,0.7)"}},
                text=[_text(box, several=several) for box in boxes],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                insidetextfont={"color": ink_on(fill), "size": 12},
                customdata=[f"<b>{box.action}</b><br>from {box.start:g} to {box.end:g}" for box in boxes],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    return bars


def _text(box: LessonBox, *, several: bool) -> str:
    return f"{box.action.stage if several else ''}{box.action.kind}{box.action.microbatch}"


def _now(one: Lesson) -> dict[str, Any]:
    """A line at the time."""
    return scatter(
        x=[one.length, one.length],
        y=[-0.5, one.num_ranks - 0.5],
        mode="lines",
        line={"color": MUTED, "width": 1.5},
        hoverinfo="skip",
        showlegend=False,
    )


def _notes(one: Lesson, time: float) -> dict[str, list[dict[str, object]]]:
    """Number of microbatches in flight, as an annotation next to each rank."""
    notes = [
        {
            "x": 1.005,
            "xref": "paper",
            "xanchor": "left",
            "y": rank,
            "yref": "y",
            "text": f"holds {one.in_flight(rank, time)}, most {one.most_in_flight[rank]}",
            "showarrow": False,
            "font": {"size": 11},
        }
        for rank in range(one.num_ranks)
    ]
    return {"annotations": notes}


def _instants(length: float) -> list[float]:
    """Times of the frames, one per time unit up to a maximum number."""
    distance = max(1, math.ceil(length / _MOST_FRAMES))
    return [float(time) for time in range(0, math.ceil(length), distance)] + [length]


def _buttons() -> dict[str, object]:
    play = {"frame": {"duration": _FRAME_MS, "redraw": True}, "transition": {"duration": 0}, "fromcurrent": True}
    again = {**play, "fromcurrent": False}
    stop = {"frame": {"duration": 0, "redraw": False}, "mode": "immediate"}
    return {
        "type": "buttons",
        "direction": "left",
        "showactive": False,
        "x": 0,
        "y": 0,
        "xanchor": "left",
        "yanchor": "top",
        "pad": {"t": 50},
        "buttons": [
            {"label": "Play", "method": "animate", "args": [None, again]},
            {"label": "Go on", "method": "animate", "args": [None, play]},
            {"label": "Stop", "method": "animate", "args": [[None], stop]},
        ],
    }


def _slider(instants: Sequence[float]) -> dict[str, object]:
    at = {"frame": {"duration": 0, "redraw": True}, "mode": "immediate", "transition": {"duration": 0}}
    return {
        "active": len(instants) - 1,
        "x": 0,
        "len": 1,
        "y": 0,
        "yanchor": "top",
        "pad": {"t": 84},
        "currentvalue": {"prefix": "time ", "xanchor": "right", "font": {"size": 12}},
        "tickwidth": 0,
        "minorticklen": 0,
        "steps": [{"label": f"{time:g}", "method": "animate", "args": [[f"{time:g}"], at]} for time in instants],
    }
