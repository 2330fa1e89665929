"""Animated schedule on a tiny pipeline with equal stages and zero-cost communication: for learning, not for planning.

Its buttons and its slider run in the browser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.figures.style import ACTIONS, MUTED, Figure, bar, figure, scatter
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.program.action import Action, ActionKind
from simplan.program.schedules import SCHEDULES, PipelineShape
from simplan.program.schedules.shape import StageTimes, action_ends_s
from simplan.report.drawings.drawing import WORDS
from simplan.report.drawings.drawing_svg import ink_on
from simplan.report.drawings.svg import shade

CLOSED_FORMS: Mapping[str, str] = {
    "naive": "(p-1)/p",
    "gpipe": "(p-1)/(m+p-1)",
    "1f1b": "(p-1)/(m+p-1)",
    "interleaved_1f1b": "(p-1)/(v m+p-1)",
}
"""Bubble fraction in closed form, for equal stages and zero-cost communication; m a multiple of p if interleaved."""


@dataclass(frozen=True, slots=True)
class LessonBox:
    """One action of one rank, in units of the time of a forward."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LessonTimes:
    """Times of every stage for one microbatch, in any unit.

    Attributes:
        forward: Forward (F).
        backward_input: Backward for the input (I).
        backward_weight: Backward for the weights (W).
        send: Time from the end of an action to the arrival of its result on a neighboring rank.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    send: float = 0.0

    @property
    def backward(self) -> float:
        """Full backward (B)."""
        return self.backward_input + self.backward_weight


@dataclass(frozen=True)
class ScheduleLesson:
    """A schedule, step by step.

    Attributes:
        name: Name of the schedule.
        num_ranks: Number of pipeline ranks, p.
        num_microbatches: Number of microbatches, m.
        virtual_stages: Number of stages per rank, v.
        boxes: Actions by rank, then by time.
        times: Times of every stage.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    virtual_stages: int
    boxes: tuple[LessonBox, ...]
    times: LessonTimes = LessonTimes()

    @cached_property
    def length(self) -> float:
        """Time from the first start to the last end."""
        return max(box.end for box in self.boxes)

    @cached_property
    def bubble_fraction(self) -> float:
        """Fraction of ``length`` in which ranks idle, mean over ranks."""
        return self.idle / (self.num_ranks * self.length)

    @cached_property
    def idle(self) -> float:
        """Idle time, summed over ranks."""
        return self.num_ranks * self.length - sum(box.end - box.start for box in self.boxes)

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """Maximum number of microbatches in flight per rank, counted per stage."""
        starts = {box.start for box in self.boxes}
        return tuple(max(self.in_flight(rank, time) for time in starts) for rank in range(self.num_ranks))

    def in_flight(self, rank: int, time: float) -> int:
        """Microbatches in flight on a rank at a time: from the start of F to the end of B, or of W."""
        boxes = [box for box in self.boxes if box.rank == rank]
        begun = sum(box.start <= time for box in boxes if box.action.kind is ActionKind.FORWARD)
        ends = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        return begun - sum(box.end <= time for box in boxes if box.action.kind in ends)


def lesson(
    name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 2, times: LessonTimes | None = None
) -> ScheduleLesson:
    """Computes the timeline of a schedule.

    Args:
        name: Key of ``SCHEDULE_FACTS``.
        num_ranks, num_microbatches: Size of the pipeline and number of microbatches.
        virtual_stages: Stages per rank, for schedules without a fixed number.
        times: Times of every stage; None for unit times and zero-cost communication.
    """
    stages = SCHEDULE_FACTS[name].virtual_stages or virtual_stages
    times = times or LessonTimes()
    stage_times = StageTimes.equal(
        num_ranks * stages, times.forward, times.backward_input, times.backward_weight, times.send
    )
    table = SCHEDULES[name](PipelineShape(num_ranks, num_microbatches, stages, stage_times))
    ends = action_ends_s(table, stage_times)
    boxes = tuple(
        LessonBox(rank, action, ends[action] - stage_times.duration_s(action), ends[action])
        for rank, row in enumerate(table)
        for action in row
    )
    return ScheduleLesson(name, num_ranks, num_microbatches, stages, boxes, times)


_ROW_PX, _AROUND_PX = 42, 215
_MAX_FRAMES = 120
_FRAME_MS = 320


def lesson_figure(one: ScheduleLesson) -> Figure:
    """The full step; playing the figure draws the step from its start."""
    groups = _groups(one)
    instants = _instants(one)
    whole = figure(
        [*_bars(one, groups), _time_line(one)],
        height=_AROUND_PX + _ROW_PX * one.num_ranks,
        barmode="overlay",
        bargap=0,
        uniformtext={"minsize": 8, "mode": "hide"},
        margin={"t": 40, "r": 110},
        updatemenus=[_buttons()],
        sliders=[_slider(instants)],
        xaxis={"title": "time, units", "range": [0, one.length * 1.002], "showgrid": True},
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


def _groups(one: ScheduleLesson) -> list[_Group]:
    """Boxes by kind and by index of the stage on its rank, which determine the color."""
    stages = [sorted({box.action.stage for box in one.boxes if box.rank == rank}) for rank in range(one.num_ranks)]
    groups: dict[tuple[ActionKind, int], list[LessonBox]] = {}
    for box in one.boxes:
        groups.setdefault((box.action.kind, stages[box.rank].index(box.action.stage)), []).append(box)
    return [
        (kind, place, groups[kind, place])
        for kind in ActionKind
        for place in range(one.virtual_stages)
        if (kind, place) in groups
    ]


def _until(one: ScheduleLesson, groups: Sequence[_Group], time: float) -> list[dict[str, object]]:
    """Traces of an animation frame: boxes up to its time, and a line at its time.

    A box that has not begun has no width instead of zero width, whose outline would be drawn.
    """
    several = one.virtual_stages > 1
    bars: list[dict[str, object]] = [
        {
            "type": "bar",
            "x": [min(box.end, time) - box.start if box.start < time else None for box in boxes],
            "text": [_text(box, several=several) if box.start < time else "" for box in boxes],
        }
        for _, _, boxes in groups
    ]
    return [*bars, {"type": "scatter", "x": [time, time]}]


def _bars(one: ScheduleLesson, groups: Sequence[_Group]) -> list[dict[str, Any]]:
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


def _time_line(one: ScheduleLesson) -> dict[str, Any]:
    return scatter(
        x=[one.length, one.length],
        y=[-0.5, one.num_ranks - 0.5],
        mode="lines",
        line={"color": MUTED, "width": 1.5},
        hoverinfo="skip",
        showlegend=False,
    )


def _notes(one: ScheduleLesson, time: float) -> dict[str, list[dict[str, object]]]:
    """Number of microbatches in flight, as an annotation next to each rank."""
    place = {"x": 1.005, "xref": "paper", "xanchor": "left", "yref": "y", "showarrow": False, "font": {"size": 11}}
    texts = (f"{one.in_flight(rank, time)} in flight, max {most}" for rank, most in enumerate(one.most_in_flight))
    return {"annotations": [place | {"y": rank, "text": text} for rank, text in enumerate(texts)]}


def _instants(one: ScheduleLesson) -> list[float]:
    """Times of the frames: one per time unit, or per shortest action, up to a maximum number."""
    shortest = min(1.0, *(box.end - box.start for box in one.boxes))
    num_frames = min(_MAX_FRAMES, math.ceil(one.length / shortest - 1e-9))
    return [round(one.length * frame / num_frames, 6) for frame in range(num_frames)] + [one.length]


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
            {"label": "Continue", "method": "animate", "args": [None, play]},
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
