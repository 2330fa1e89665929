"""One step as a Gantt chart: one row per rank and a thin lane for its communication; white space is the bubble.

Several plans are stacked on one time axis. Memory over time is drawn below, on the same axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from app.figures.style import Figure, across, bar, figure, numbered, scatter
from app.palette import ACTIONS, COMMUNICATION, MEMORY, MUTED, PLANS
from app.results.timeline import MemoryCurve, TimelineBox, TimelineResult
from simplan.program.action import ActionKind
from simplan.report.drawings.drawing_labels import WORDS
from simplan.report.drawings.drawing_svg import ink_on
from simplan.units import GIB, format_bytes, format_time

__all__ = ["gantt_figure", "shade"]

_ROW_PX, _MEMORY_PX, _AROUND_PX, _TITLE_PX, _BELOW_PX = 34, 190, 125, 26, 56
_LANE, _THIN, _THIN_AT = 0.62, 0.14, 0.40  # heights of a row and of its communication lane, and the lane's offset
_LIGHTEST = 0.5
_MOST_TEXTS = 1_200
_ORDER = {kind: number for number, kind in enumerate(ActionKind)}
_OUTLINE = {"width": 0.6, "color": "rgba(120,128,140,0.55)"}
_CAPACITY = {"color": "#d1495b", "width": 1.5, "dash": "dash"}


@dataclass(frozen=True, slots=True)
class _Scale:
    """The time axis: its unit, and seconds of one."""

    unit: str
    unit_s: float


def gantt_figure(results: Sequence[TimelineResult], memory_rank: int | None = None) -> Figure:
    """The chart.

    Args:
        results: One plan, or several to compare; the first is on top.
        memory_rank: Rank whose memory is drawn by category, for one plan; None for the peak-memory rank. With several
            plans, the total memory of each plan's peak-memory rank is drawn.
    """
    step_s = max(result.step_time_s for result in results)
    scale = _Scale("s", 1.0) if step_s >= 1.0 else _Scale("ms", 1e-3)
    heights = [_TITLE_PX + _ROW_PX * len(result.lanes) for result in results] + [_MEMORY_PX]
    total = sum(heights)
    titles = [_title(result, several=len(results) > 1) for result in results]
    places = _places(heights)
    last = len(heights)
    texts = sum(len(lane.compute) for result in results for lane in result.lanes) <= _MOST_TEXTS
    legend: set[str] = set()
    traces: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for row, result in enumerate(results, start=1):
        traces += [trace | {"yaxis": numbered("y", row)} for trace in _boxes(result, scale, legend, texts=texts)]
        axes[numbered("yaxis", row)] = {
            "domain": places[row - 1],
            "tickvals": list(range(len(result.lanes))),
            "ticktext": [f"rank {lane.rank}" for lane in result.lanes],
            "range": [len(result.lanes) - 0.35, -0.5],
            "showgrid": False,
            "fixedrange": True,
        }
    memory = _memory_of_one(results[0], scale, memory_rank) if len(results) == 1 else _memory_of_several(results, scale)
    traces += [trace | {"yaxis": f"y{last}"} for trace in memory]
    axes[f"yaxis{last}"] = {"domain": places[-1], "title": "GiB", "rangemode": "tozero", "fixedrange": True}
    capacity = results[0].capacity_bytes
    near = capacity is not None and capacity < 3 * max(result.peak_bytes for result in results)
    lowest_s = min(result.window_s[0] for result in results)
    end_s = max(min(result.window_s[1], result.step_time_s) for result in results)
    axes["xaxis"] = {
        "anchor": f"y{last}",
        "title": f"time, {scale.unit}",
        "range": [lowest_s / scale.unit_s, (end_s + 0.005 * (end_s - lowest_s)) / scale.unit_s],
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
        annotations=[_note(text, place[1]) for text, place in zip(titles, places, strict=False)],
        shapes=[across(capacity / GIB, _CAPACITY, yaxis=f"y{last}")] if capacity is not None and near else [],
        **axes,
    )


def _places(heights: Sequence[int]) -> list[tuple[float, float]]:
    """From where to where each panel goes, as shares of the height; the first is on top."""
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


def shade(colour: str, place: int, number: int) -> str:
    """Color, lighter for later stages of a rank.

    Args:
        colour: Color of the first stage, ``#rrggbb``.
        place: Index of the stage, from 0.
        number: Number of stages.

    >>> shade("#000000", 1, 2), shade("#3b7dd8", 0, 1)
    ('#808080', '#3b7dd8')
    """
    share = _LIGHTEST * place / max(1, number - 1)
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def _title(result: TimelineResult, *, several: bool) -> str:
    name = f"<b>{result.name}</b>, " if several else ""
    return f"{name}{format_time(result.step_time_s)} a step, compute idles {result.bubble_fraction:.1%}"


def _boxes(result: TimelineResult, scale: _Scale, legend: set[str], *, texts: bool) -> Iterable[dict[str, Any]]:
    """One trace per kind of action, and one for communication."""
    by_look: dict[tuple[int, bool, str], list[tuple[int, TimelineBox]]] = {}
    for number, lane in enumerate(result.lanes):
        for box in lane.compute:
            fill = shade(ACTIONS.get(box.kind, MUTED), lane.stages.index(box.stage), len(lane.stages))
            by_look.setdefault((_ORDER[box.kind], box.recompute_s > 0, fill), []).append((number, box))
    several = any(len(lane.stages) > 1 for lane in result.lanes)
    for (_, recomputes, fill), found in sorted(by_look.items(), key=lambda item: item[0][:2]):
        kind = found[0][1].kind
        name = WORDS.get(kind, str(kind)) + (", recomputing" if recomputes else "")
        yield bar(
            name=name,
            legendgroup=name,
            showlegend=_first(name, legend),
            orientation="h",
            y=[number for number, _ in found],
            base=[box.start_s / scale.unit_s for _, box in found],
            x=[(box.end_s - box.start_s) / scale.unit_s for _, box in found],
            width=_LANE,
            offset=-_LANE / 2,
            marker={
                "color": fill,
                "line": _OUTLINE,
                **({"pattern": _hatched(fill)} if recomputes else {}),
            },
            text=[_text(box, several=several) if texts else "" for _, box in found],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": ink_on(fill), "size": 11},
            customdata=[_hover(box) for _, box in found],
            hovertemplate="%{customdata}<extra></extra>",
        )
    communications = [(number, box) for number, lane in enumerate(result.lanes) for box in lane.communications]
    if communications:
        yield bar(
            name="communication",
            legendgroup="communication",
            showlegend=_first("communication", legend),
            orientation="h",
            y=[number + _THIN_AT for number, _ in communications],
            base=[box.start_s / scale.unit_s for _, box in communications],
            x=[(box.end_s - box.start_s) / scale.unit_s for _, box in communications],
            width=_THIN,
            offset=-_THIN / 2,
            opacity=0.85,
            marker={"color": COMMUNICATION, "line": {"width": 0}},
            customdata=[_hover(box) for _, box in communications],
            hovertemplate="%{customdata}<extra></extra>",
        )


def _hatched(fill: str) -> dict[str, Any]:
    return {"shape": "/", "size": 6, "solidity": 0.2, "bgcolor": fill, "fgcolor": "rgba(255,255,255,0.75)"}


def _first(name: str, seen: set[str]) -> bool:
    """True for a name that is not in the legend yet; adds it to ``seen``."""
    new = name not in seen
    seen.add(name)
    return new


def _text(box: TimelineBox, *, several: bool) -> str:
    if box.microbatch is None:
        return str(box.kind) if len(str(box.kind)) <= 2 else ""
    return f"{box.stage if several else ''}{box.kind}{box.microbatch}"


def _hover(box: TimelineBox) -> str:
    of = f"microbatch {box.microbatch}, stage {box.stage}" if box.microbatch is not None else f"stage {box.stage}"
    lines = [
        f"<b>{box.label}</b>  {of}",
        f"starts at {format_time(box.start_s)}, takes {format_time(box.end_s - box.start_s)}",
    ]
    if box.recompute_s:
        lines.append(f"{format_time(box.recompute_s)} of it recomputing")
    if box.waited_s:
        lines.append(f"waited {format_time(box.waited_s)} for {box.waited_for}")
    if box.num_bytes:
        lines.append(f"moves {format_bytes(box.num_bytes)}")
    return "<br>".join([*lines, box.formula])


def _memory_of_one(result: TimelineResult, scale: _Scale, rank: int | None) -> Iterable[dict[str, Any]]:
    curve = next((curve for curve in result.memory if curve.rank == rank), None) or _largest(result)
    times = [time_s / scale.unit_s for time_s in (*curve.times_s, result.step_time_s)]
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


def _memory_of_several(results: Sequence[TimelineResult], scale: _Scale) -> Iterable[dict[str, Any]]:
    for result, colour, dash in zip(
        results, PLANS, ("solid", "dash", "dot", "dashdot", "longdash", "solid"), strict=False
    ):
        curve = _largest(result)
        total = curve.total_bytes
        yield scatter(
            name=f"{result.name}, rank {curve.rank}",
            x=[time_s / scale.unit_s for time_s in (*curve.times_s, result.step_time_s)],
            y=[value / GIB for value in (*total, total[-1])],
            mode="lines",
            line={"width": 1.6, "shape": "hv", "color": colour, "dash": dash},
            hovertemplate=f"{result.name}, rank {curve.rank}: %{{y:.2f}} GiB<extra></extra>",
        )


def _largest(result: TimelineResult) -> MemoryCurve:
    return max(result.memory, key=lambda curve: (max(curve.total_bytes), -curve.rank))
