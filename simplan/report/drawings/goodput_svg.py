"""Waterfall of the time of a whole run, and its goodput over the checkpoint interval, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from simplan.explain.charts import goodput_over_interval
from simplan.report.drawings.charts_svg import CHART_WIDTH, curve_parts
from simplan.report.drawings.drawing import clean
from simplan.report.drawings.svg import SOFT, Element, line, page, rect, soft, text, written
from simplan.report.goodput import PARTS, headline
from simplan.units import format_percent, format_span

WIDTH, _LEFT, _RIGHT, _TOP = 960, 190, 190, 84
_BAR, _ROW, _GAP = 20, 28, 26
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
_FEWEST_POINTS = 3


def goodput_svg(document: Mapping[str, Any]) -> str:
    """The drawing as an SVG document, 960 px wide.

    Args:
        document: JSON of ``simplan goodput``.
    """
    heading = f"{clean(document['name'])}: the time of the whole run"
    elements, height = goodput_elements(document, _TOP)
    root = page(heading, WIDTH, height, headline(document), left=24)
    root.extend(elements)
    return written(root)


def goodput_elements(document: Mapping[str, Any], top: float) -> tuple[list[Element], float]:
    """Waterfall and curve below a height, and the height of their end."""
    parts = {name: document["waterfall_s"][name] for name in COLOURS if document["waterfall_s"].get(name, 0.0) > 0}
    bottom = top + _ROW * len(parts) + _GAP
    elements = _waterfall(parts, top)
    if len(document["interval_curve"]) < _FEWEST_POINTS:
        return elements, bottom + 34
    curves, height = curve_parts(goodput_over_interval(document))
    below = Element("g", {"transform": f"translate({(WIDTH - CHART_WIDTH) / 2:g} {bottom:g})"})
    below.append(text(16, 46, "Goodput over the checkpoint interval", size=13, bold=True))
    below.extend(curves)
    return [*elements, below], bottom + height


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
        elements += [group, text(_LEFT - 10, place + 14, words, anchor="end")]
        elements.append(soft(right + 8, place + 14, label))
        start_s += seconds
        if row + 1 < len(parts):
            elements.append(line(right, place + _BAR, right, place + _ROW, SOFT))
    return elements
