"""Waterfall of the time of a whole run, and its goodput over the checkpoint interval, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from simplan.report.drawings.drawing import clean
from simplan.report.drawings.svg import PAPER, SOFT, Element, line, night_style, picture, rect, text, written
from simplan.report.goodput import PARTS, headline
from simplan.units import format_percent, format_span

WIDTH, _LEFT, _RIGHT, _TOP = 960, 190, 190, 84
_BAR, _ROW, _GAP = 20, 28, 26
_CURVE_HEIGHT = 220
_GRID = "#d3d8de"
COLOURS = {
    "compute": "#3b7dd8",
    "evaluation": "#4ea5b7",
    "checkpoint": "#8c7aa9",
    "lost_work": "#d1495b",
    "detection": "#f2c14e",
    "diagnosis": "#c8a24a",
    "waiting": "#a3abb5",
    "restart": "#e38a42",
    "membership": "#c2548a",
    "slow_device": "#7a1f4b",
    "fewer_nodes": "#565f6a",
    "maintenance": "#2f6f86",
}
"""Colors of the parts of the time of a run, in the order of the waterfall."""
_MOST = 0.5
"""Share of the time from which compute has a scale of its own."""
_MARKS = (("best_interval_s", "best", "#2e8b57"), ("young_s", "Young", "#8c7aa9"), ("daly_s", "Daly", "#e38a42"))
_FEWEST_POINTS = 3


def goodput_svg(document: Mapping[str, Any]) -> str:
    """The drawing as an SVG document, 960 px wide.

    Args:
        document: JSON of ``simplan goodput``.
    """
    heading = f"{clean(document['name'])}: the time of the whole run"
    elements, height = goodput_elements(document, _TOP)
    root = titled(heading, headline(document), height)
    root.extend(elements)
    return written(root)


def titled(heading: str, below: str, height: float) -> Element:
    """Picture of this width with a heading and a line below it."""
    root = picture(heading, WIDTH, height)
    root.append(night_style())
    root.append(rect(0, 0, WIDTH, height, PAPER, css="paper"))
    root.append(text(24, 30, heading, size=16, bold=True, css="ink"))
    root.append(soft(24, 50, below))
    return root


def goodput_elements(document: Mapping[str, Any], top: float) -> tuple[list[Element], float]:
    """Waterfall and curve below a height, and the height of their end."""
    parts = {name: document["waterfall_s"][name] for name in COLOURS if document["waterfall_s"].get(name, 0.0) > 0}
    curve = document["interval_curve"] if len(document["interval_curve"]) >= _FEWEST_POINTS else []
    bottom = top + _ROW * len(parts) + _GAP
    elements = _waterfall(parts, top)
    if curve:
        elements += _curve(document, bottom + 74)
    return elements, bottom + 34 + (_CURVE_HEIGHT + 100 if curve else 0)


def _waterfall(parts: Mapping[str, float], top: float) -> list[Element]:
    """One bar per part, each from the end of the one above; compute to a scale of its own if it is most of the time."""
    total_s = sum(parts.values())
    first, *others = parts
    if not others or parts[first] < _MOST * total_s:
        return _bars(parts, total_s, total_s, top)
    rest_s = total_s - parts[first]
    words = f"the other {format_span(rest_s)} ({format_percent(rest_s / total_s)}), to a larger scale"
    rest = {name: parts[name] for name in others}
    return [
        *_bars({first: parts[first]}, total_s, total_s, top),
        soft(_LEFT, top + _ROW + _GAP - 10, words),
        *_bars(rest, rest_s, total_s, top + _ROW + _GAP),
    ]


def _bars(parts: Mapping[str, float], scale_s: float, total_s: float, top: float) -> list[Element]:
    """Bars of parts.

    Args:
        scale_s: Seconds of the whole width.
        total_s: Seconds of the run.
    """
    width = WIDTH - _LEFT - _RIGHT
    elements, start_s = [], 0.0
    for row, (name, seconds) in enumerate(parts.items()):
        place, words = top + _ROW * row, PARTS[name]
        left, right = (_LEFT + width * each_s / scale_s for each_s in (start_s, start_s + seconds))
        group = Element("g", {"class": "part"})
        label = f"{format_span(seconds)}, {format_percent(seconds / total_s)}"
        ElementTree.SubElement(group, "title").text = f"{words}: {label}"
        group.append(rect(left, place, max(1.5, right - left), _BAR, COLOURS[name]))
        elements += [group, text(_LEFT - 10, place + 14, words, size=12, anchor="end", css="ink")]
        elements.append(soft(right + 8, place + 14, label))
        start_s += seconds
        if row + 1 < len(parts):
            elements.append(line(right, place + _BAR, right, place + _ROW, SOFT, css="soft"))
    return elements


def _curve(document: Mapping[str, Any], top: float) -> list[Element]:
    """Goodput over the checkpoint interval, the interval logarithmic, with the best, Young's and Daly's."""
    useful_s = document["num_steps"] * document["step_time_s"]
    points = [(point["interval_s"], useful_s / point["time_s"]) for point in document["interval_curve"]]
    levels = _levels([goodput for _, goodput in points])
    lowest, highest = levels[0], levels[-1]
    width = WIDTH - _LEFT - _RIGHT
    first_s, last_s = points[0][0], points[-1][0]

    def x(interval_s: float) -> float:
        return _LEFT + width * math.log(interval_s / first_s) / math.log(last_s / first_s)

    def y(goodput: float) -> float:
        return top + _CURVE_HEIGHT * (highest - goodput) / (highest - lowest)

    words = "goodput over the checkpoint interval"
    parts = [text(24, top - 18, words, size=13, bold=True, css="ink")]
    for level in levels:
        parts.append(line(_LEFT, y(level), _LEFT + width, y(level), _GRID, css="grid"))
        parts.append(soft(_LEFT - 8, y(level) + 4, format_percent(level), anchor="end"))
    for interval_s in _ticks(first_s, last_s):
        parts.append(line(x(interval_s), top, x(interval_s), top + _CURVE_HEIGHT, _GRID, css="grid"))
        parts.append(soft(x(interval_s), top + _CURVE_HEIGHT + 18, format_span(interval_s), anchor="middle"))
    for place, (key, name, colour) in enumerate(_MARKS):
        if document[key] and first_s <= document[key] <= last_s:
            mark = line(x(document[key]), top, x(document[key]), top + _CURVE_HEIGHT, colour)
            mark.set("stroke-width", "2")
            if key != "best_interval_s":
                mark.set("stroke-dasharray", "5 4")
            parts.append(mark)
        shown = "none" if document[key] is None else format_span(document[key])
        at = top + 14 + 20 * place
        parts.append(rect(_LEFT + width + 16, at - 9, 14, 10, colour))
        parts.append(text(_LEFT + width + 36, at, f"{name} {shown}", size=12, css="ink"))
    path = "M" + "L".join(f"{x(interval_s):.1f} {y(goodput):.1f}" for interval_s, goodput in points)
    parts.append(Element("path", {"d": path, "fill": "none", "stroke": COLOURS["compute"], "stroke-width": "2"}))
    for interval_s, goodput in points:
        spot = {"cx": f"{x(interval_s):.1f}", "cy": f"{y(goodput):.1f}", "r": "3", "fill": COLOURS["compute"]}
        dot = Element("circle", spot)
        words = f"a checkpoint every {format_span(interval_s)}: goodput {format_percent(goodput)}"
        ElementTree.SubElement(dot, "title").text = f"{words}, {format_span(useful_s / goodput)}"
        parts.append(dot)
    middle = _LEFT + width / 2
    parts.append(soft(middle, top + _CURVE_HEIGHT + 40, "training between two checkpoints", anchor="middle"))
    return parts


def _levels(values: Sequence[float]) -> list[float]:
    """Round fractions around values, three to six of them."""
    most = max(max(values) - min(values), 1e-6)
    power = 10.0 ** math.floor(math.log10(most / 4))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 4 >= most)
    first, last = math.floor(min(values) / distance), math.ceil(max(values) / distance)
    return [number * distance for number in range(first, max(last, first + 1) + 1)]


_TICKS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400)


def _ticks(first_s: float, last_s: float) -> list[float]:
    return [each for each in _TICKS_S if first_s <= each <= last_s]


def soft(x: float, y: float, words: str, *, anchor: str = "start") -> Element:
    """Text of less weight."""
    return text(x, y, words, size=12, colour=SOFT, anchor=anchor, css="soft")
