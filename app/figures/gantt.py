"""One step as a Gantt chart: one row per rank and a thin lane for its communication; gaps are the bubble.

Several plans are stacked on one time axis. Memory over time is drawn below, on the same axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from app.figures.style import (
    CAPACITY,
    COMMUNICATION,
    MEMORY,
    MUTED,
    PLANS,
    Figure,
    across,
    bar,
    figure,
    numbered,
    scatter,
)
from app.figures.timeline import MemoryCurve, TimelineBox, TimelineResult
from simplan.program.action import ActionKind
from simplan.report.drawings.drawing import WORDS, box_facts, labels, time_unit
from simplan.report.drawings.drawing_svg import fill_of
from simplan.report.drawings.svg import ink_on
from simplan.units import GIB, format_bytes, format_time

_ROW_PX, _MEMORY_PX, _AROUND_PX, _TITLE_PX, _BELOW_PX = 34, 190, 125, 26, 56
_LANE, _THIN, _THIN_AT = 0.62, 0.14, 0.40  # heights of a row and of its communication lane, and the lane's offset
_MAX_TEXTS = 1_200
_BRIEFLY = 1e-6  # fraction of a step
_ORDER = {kind: number for number, kind in enumerate(ActionKind)}
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "solid")
_HATCH = {"shape": "/", "size": 6, "solidity": 0.2, "fgcolor": "rgba(255,255,255,0.75)"}


def gantt_figure(results: Sequence[TimelineResult], memory_rank: int | None = None) -> Figure:
    """Timelines of one plan or several, the first on top, and memory: by category for one plan, else in total.

    Args:
        results: One result per plan.
        memory_rank: Rank of the memory of one plan; None for the peak-memory rank.
    """
    step_s = max(result.step_time_s for result in results)
    unit, unit_s = time_unit(step_s)
    heights = [_TITLE_PX + _ROW_PX * len(result.lanes) for result in results] + [_MEMORY_PX]
    total = sum(heights)
    several = len(results) > 1
    titles = [
        f"<b>{result.name}</b>, " * several
        + f"{format_time(result.step_time_s)} per step, compute idles {result.bubble_fraction:.1%}"
        for result in results
    ]
    places = _places(heights)
    last = len(heights)
    texts = sum(len(lane.compute) for result in results for lane in result.lanes) <= _MAX_TEXTS
    legend: set[str] = set()
    traces: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for row, result in enumerate(results, start=1):
        traces += [trace | {"yaxis": numbered("y", row)} for trace in _boxes(result, unit_s, legend, texts=texts)]
        axes[numbered("yaxis", row)] = {
            "domain": places[row - 1],
            "tickvals": list(range(len(result.lanes))),
            "ticktext": [f"rank {lane.rank}" for lane in result.lanes],
            "range": [len(result.lanes) - 0.35, -0.5],
            "showgrid": False,
            "fixedrange": True,
        }
    memory = _memory_of_several(results, unit_s) if several else _memory_of_one(results[0], unit_s, memory_rank)
    traces += [trace | {"yaxis": f"y{last}"} for trace in memory]
    axes[f"yaxis{last}"] = {"domain": places[-1], "title": "GiB", "rangemode": "tozero", "fixedrange": True}
    capacity = results[0].capacity_bytes
    if capacity is not None and capacity >= 3 * max(result.peak_bytes for result in results):
        capacity = None  # far above everything
    lowest_s = min(result.window_s[0] for result in results)
    end_s = max(min(result.window_s[1], result.step_time_s) for result in results)
    axes["xaxis"] = {
        "anchor": f"y{last}",
        "title": f"time, {unit}",
        "range": [lowest_s / unit_s, (end_s + 0.005 * (end_s - lowest_s)) / unit_s],
    }
    return figure(
        traces,
        height=total + _AROUND_PX,
        barmode="overlay",
        bargap=0,
        uniformtext={"minsize": 8, "mode": "hide"},
        legend={"y": 1.0 + 26 / total},
        legend2={"orientation": "h", "x": 0, "y": -_BELOW_PX / total, "yanchor": "top", "font": {"size": 11}},
        margin={"t": 60},
        dragmode="zoom",
        hovermode="closest",
        annotations=[
            *(_note(text, place[1]) for text, place in zip(titles, places, strict=False)),
            *([] if capacity is None else [_note(_capacity_words(results, capacity), places[-1][1])]),
        ],
        shapes=[] if capacity is None else [across(capacity / GIB, CAPACITY, yaxis=f"y{last}")],
        **axes,
    )


def _places(heights: Sequence[int]) -> list[tuple[float, float]]:
    """Bottom and top of each panel as fractions of the height; the first panel is on top."""
    total = sum(heights)
    between = min(0.06, 30 / total)
    rest = 1 - between * (len(heights) - 1)
    places, top = [], 1.0
    for height in heights:
        bottom = max(0.0, top - rest * height / total)
        places.append((bottom, top))
        top = bottom - between
    return places


def _note(text: str, y: float) -> dict[str, Any]:
    """A title at the left above a panel."""
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": y, "yref": "paper", "yanchor": "bottom"}
    return {"text": text, "showarrow": False, "align": "left", "font": {"size": 12}, **place}


def _capacity_words(results: Sequence[TimelineResult], capacity_bytes: int) -> str:
    """Title of the memory: its dashed line, and the plans that do not fit, as the device holds more than tensors."""
    needs = {result.name: max(curve.needed_bytes for curve in result.memory) for result in results}
    too_large = [name for name, num_bytes in needs.items() if num_bytes > capacity_bytes]
    size = f"{format_bytes(capacity_bytes)} of the device (dashed)"
    if not too_large:
        return f"memory, and {size}"
    names = f"{' and '.join(too_large)} " if len(results) > 1 else ""
    return f"<b>{names}{'do' if len(too_large) > 1 else 'does'} not fit</b> in {size}"


def label_words(*, several: bool) -> str:
    """Meaning of the labels of boxes, e.g. ``4B0``; with the stage where a rank has several."""
    stage, of_stage = ("4", " in stage 4") if several else ("", "")
    return (
        f"{stage}B0 is the backward (B) of microbatch 0{of_stage}, F a forward, I and W the parts of a backward for "
        "inputs and for weights"
    )


def _boxes(result: TimelineResult, unit_s: float, legend: set[str], *, texts: bool) -> Iterable[dict[str, Any]]:
    """One trace per kind and shade of actions, and one for communication; the first of a name is in the legend."""
    by_look: dict[tuple[int, bool, str], list[tuple[int, TimelineBox]]] = {}
    for row, lane in enumerate(result.lanes):
        for box in lane.compute:
            kind, stage = box.action.kind, box.action.stage
            fill = fill_of(kind, lane.stages.index(stage), len(lane.stages))
            by_look.setdefault((_ORDER[kind], box.recompute_s > 0, fill), []).append((row, box))
    several = any(len(lane.stages) > 1 for lane in result.lanes)

    def trace(name: str, boxes: Sequence[tuple[float, TimelineBox]], fill: str, **look: Any) -> dict[str, Any]:
        is_first = name not in legend
        legend.add(name)
        return _boxes_trace(name, boxes, unit_s, fill, **look) | {"legendgroup": name, "showlegend": is_first}

    for (_, recomputes, fill), boxes in sorted(by_look.items(), key=lambda item: item[0][:2]):
        kind = boxes[0][1].action.kind
        name = WORDS.get(kind, str(kind)) + (", recomputing" if recomputes else "")
        words = [_text(box, several=several) if texts else "" for _, box in boxes]
        look = {"text": words, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        drawn = trace(name, boxes, fill, width=_LANE, insidetextfont={"color": ink_on(fill), "size": 11}, **look)
        if recomputes:
            drawn["marker"]["pattern"] = _HATCH | {"bgcolor": fill}
        yield drawn
    communications = [(row + _THIN_AT, box) for row, lane in enumerate(result.lanes) for box in lane.communications]
    if communications:
        yield trace("communication", communications, COMMUNICATION, width=_THIN, outline=0, opacity=0.85)


def _boxes_trace(
    name: str,
    boxes: Sequence[tuple[float, TimelineBox]],
    unit_s: float,
    fill: str,
    *,
    width: float,
    outline: float = 0.6,
    **look: Any,
) -> dict[str, Any]:
    """A trace of boxes.

    Args:
        name: Name in the legend.
        boxes: Row of each box, and the box.
        unit_s: Unit of the time axis in seconds.
        fill: Color of the boxes.
        width: Height of the boxes, as a part of a row.
        outline: Width of the outline in pixels.
        look: Further keys of Plotly's trace.
    """
    return bar(
        name=name,
        orientation="h",
        y=[row for row, _ in boxes],
        base=[box.start_s / unit_s for _, box in boxes],
        x=[box.duration_s / unit_s for _, box in boxes],
        width=width,
        offset=-width / 2,
        marker={"color": fill, "line": {"width": outline, "color": "rgba(120,128,140,0.55)"}},
        customdata=[_hover(box) for _, box in boxes],
        hovertemplate="%{customdata}<extra></extra>",
        **look,
    )


def _text(box: TimelineBox, *, several: bool) -> str:
    return "" if box.num_merged > 1 or box.action.microbatch is None else labels(box, several)[0]


def _hover(box: TimelineBox) -> str:
    if box.num_merged > 1:
        lines = [
            f"<b>{box.num_merged:,} boxes drawn as one</b>",
            box.label,
            f"from {format_time(box.start_s)} for {format_time(box.duration_s)}, {format_time(box.busy_s)} in sum",
        ]
    else:
        of, *times = box_facts(box)
        lines = [f"<b>{box.label}</b>  {of}", *times]
    if box.waited_s:
        lines.append(f"waited {format_time(box.waited_s)} for {box.waited_for}")
    if box.num_bytes:
        lines.append(f"moves {format_bytes(box.num_bytes)}")
    return "<br>".join([*lines, box.formula])


def _memory_of_one(result: TimelineResult, unit_s: float, rank: int | None) -> Iterable[dict[str, Any]]:
    curve = next((curve for curve in result.memory if curve.rank == rank), None) or result.peak_memory
    times = _times(curve, result, unit_s)
    for category, values in curve.by_category.items():
        name = str(category).replace("_", " ")
        yield scatter(
            name=name,
            legend="legend2",
            x=times,
            y=[value / GIB for value in (*values, values[-1])],
            stackgroup="memory",
            line={"width": 0, "shape": "hv"},
            fillcolor=MEMORY.get(category, MUTED),
            hovertemplate=f"rank {curve.rank}, {name}: %{{y:.2f}} GiB<extra></extra>",
        )
    yield _peak(curve, result, unit_s, MUTED, "legend2")


def _times(curve: MemoryCurve, result: TimelineResult, unit_s: float) -> list[float]:
    """Times of a curve on the axis; stacked areas need strictly ascending ones."""
    least_s, times = _BRIEFLY * result.step_time_s, [-math.inf]
    for time_s in (*curve.times_s, result.step_time_s):
        times.append(max(time_s, times[-1] + least_s))
    return [time_s / unit_s for time_s in times[1:]]


def _peak(curve: MemoryCurve, result: TimelineResult, unit_s: float, color: str, legend: str) -> dict[str, Any]:
    """A mark at the peak, which may last too short for the area of a curve to show it."""
    time_s, num_bytes = curve.peak
    when = f"during {curve.peak_action}" if curve.peak_action else "between steps"
    return scatter(
        name=f"peak {format_bytes(num_bytes)}",
        legend=legend,
        x=[time_s / unit_s],
        y=[num_bytes / GIB],
        mode="markers",
        marker={"symbol": "triangle-down", "size": 10, "color": color, "line": {"width": 1, "color": "white"}},
        hovertemplate=f"{result.name}, rank {curve.rank}<br>peak of tensors {format_bytes(num_bytes)} {when}"
        f"<br>{format_bytes(curve.needed_bytes)} on the device<extra></extra>",
    )


def _memory_of_several(results: Sequence[TimelineResult], unit_s: float) -> Iterable[dict[str, Any]]:
    for result, colour, dash in zip(results, PLANS, _DASHES, strict=False):
        curve = result.peak_memory
        total = curve.total_bytes
        yield scatter(
            name=f"{result.name}, rank {curve.rank}",
            x=_times(curve, result, unit_s),
            y=[value / GIB for value in (*total, total[-1])],
            mode="lines",
            line={"width": 1.6, "shape": "hv", "color": colour, "dash": dash},
            hovertemplate=f"{result.name}, rank {curve.rank}: %{{y:.2f}} GiB<extra></extra>",
        )
        yield _peak(curve, result, unit_s, colour, "legend") | {"showlegend": False}
