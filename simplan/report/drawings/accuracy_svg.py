"""Predicted over measured step times as SVG: one panel and one color per file, for light and dark pages."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from simplan.report.drawings.accuracy_plot import ERRORS, AccuracyPlot, Panel, PlotPoint, time_ticks
from simplan.report.drawings.drawing import clean
from simplan.report.drawings.svg import GRID, SOFT, Element, line, page, rect, soft, text, written
from simplan.units import counted, format_percent, format_time

COLOURS = (
    "#2f7fc1", "#cf5f08", "#3a9147", "#d1495b", "#8d69c9", "#a0704f",
    "#c2549d", "#7c7f86", "#86841a", "#1a8d9c", "#5f74e0", "#b57200",
)  # fmt: skip
"""Colors of the files, in turn: legible on white and on black backgrounds."""

_BAND, _BAND_OPACITY = "#000000", "0.1"
_WITHIN = 0.1  # the band around no error
_TITLE = "Predicted and measured step times"
_WIDTH, _LEFT, _RIGHT, _GAP = 960, 72, 14, 16
_TOP, _CAPTION, _HEIGHT, _DISTANCE = 72, 40, 140, 192
_COLUMNS = 3
_RADIUS = 3.0
_LETTER_PX, _DIGIT_PX = 7.2, 6.7  # of a name of 13 px, bold, a mean; of a time of 12 px
_OPACITY = "0.85"  # of dots, which may cover each other


def accuracy_svg(plot: AccuracyPlot) -> str:
    """The plot as an SVG document, 960 px wide, with a background."""
    columns = min(_COLUMNS, len(plot.panels))
    bottom = _TOP + _DISTANCE * math.ceil(len(plot.panels) / columns)
    height = bottom + 64
    root = page(_TITLE, _WIDTH, height, *plot.heading.splitlines(), left=_LEFT)
    side = Element("g", {"transform": f"rotate(-90) translate({-(_TOP + bottom) / 2:g} 16)"})
    side.append(soft(0, 0, "error of the prediction, logarithmic", anchor="middle"))
    root.append(side)
    for number, panel in enumerate(plot.panels):
        row, column = divmod(number, columns)
        frame = _Frame(plot, column, columns, _TOP + row * _DISTANCE)
        is_lowest = number + columns >= len(plot.panels)
        root.extend(frame.axes(is_first=column == 0, is_lowest=is_lowest))
        root.append(frame.group(panel, COLOURS[number % len(COLOURS)]))
    root.append(soft((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 26, "measured step time, logarithmic", anchor="middle"))
    root.extend(_legend(plot, bottom + 48))
    return written(root)


class _Frame:
    """Position of a panel, and coordinates of ratios and times in the panel."""

    def __init__(self, plot: AccuracyPlot, column: int, columns: int, top: float) -> None:
        self._plot = plot
        self.width = (_WIDTH - _LEFT - _RIGHT - _GAP * (columns - 1)) / columns
        self.left = _LEFT + column * (self.width + _GAP)
        self.top = top + _CAPTION
        self.limit = plot.largest_ratio

    def x(self, time_s: float) -> float:
        first_s, last_s = self._plot.times_s
        return self.left + self.width * math.log(time_s / first_s) / math.log(last_s / first_s)

    def y(self, ratio: float) -> float:
        return self.top + _HEIGHT / 2 * (1 - math.log(ratio) / math.log(self.limit))

    def axes(self, *, is_first: bool, is_lowest: bool) -> list[Element]:
        """Band, grid and line of equality; labels at the left and the bottom of all panels only."""
        right, bottom = self.left + self.width, self.top + _HEIGHT
        high, low = self.y(1 + _WITHIN), self.y(1 - _WITHIN)
        parts = [_band(self.left, high, self.width, low - high)]
        for error in ERRORS[self.limit]:
            y = self.y(1 + error)
            parts.append(line(self.left, y, right, y, GRID if error else SOFT))
            if is_first:
                parts.append(soft(self.left - 6, y + 4, f"{100 * error:+.0f} %" if error else "0", anchor="end"))
        for time_s in time_ticks(*self._plot.times_s):
            x = self.x(time_s)
            parts.append(line(x, self.top, x, bottom, GRID))
            if is_lowest:
                words = f"{time_s:g} s"
                half = len(words) * _DIGIT_PX / 2
                middle = min(max(x, self.left + half), right - half)
                parts.append(soft(middle, bottom + 15, words, anchor="middle"))
        parts.append(rect(self.left, self.top, self.width, _HEIGHT, "none", stroke=GRID))
        return parts

    def group(self, panel: Panel, colour: str) -> Element:
        """Name, figures and runs of a file."""
        group = Element("g", {"class": "panel"})
        name = _clipped(panel.name, self.width)
        group.append(text(self.left, self.top - 22, name, size=13, bold=True))
        group.append(soft(self.left, self.top - 7, _caption(panel)))
        group.extend(self._mark(point, colour) for point in panel.points)
        return group

    def _mark(self, point: PlotPoint, colour: str) -> Element:
        """Mark of a run: a dot, hollow for a measurement outside of the interval, or a triangle beyond the panel."""
        filled = {"fill": colour, "fill-opacity": _OPACITY}
        hollow = {"fill": "none", "stroke": colour, "stroke-width": "1.4"}
        look = hollow if point.in_interval is False else filled
        x = self.x(point.measured_s)
        if 1 / self.limit <= point.ratio <= self.limit:
            place = {"cx": f"{x:.1f}", "cy": f"{self.y(point.ratio):.1f}", "r": f"{_RADIUS:g}"}
            mark = Element("circle", place | look)
        else:
            up = point.ratio > 1
            mark = Element("path", {"d": _triangle(x, self.top if up else self.top + _HEIGHT, up)} | look)
        ElementTree.SubElement(mark, "title").text = (
            f"{clean(point.id)}: predicted {format_time(point.predicted_s)}, measured {format_time(point.measured_s)} "
            f"({100 * (point.ratio - 1):+.1f} %)"
        )
        return mark


def _triangle(x: float, edge: float, up: bool) -> str:
    """At an edge of the panel, pointing out of it."""
    base = edge + 7 if up else edge - 7
    return f"M{x - 4:.1f} {base:.1f}H{x + 4:.1f}L{x:.1f} {edge:.1f}z"


def _caption(panel: Panel) -> str:
    figures = panel.figures
    assert figures.errors.mape is not None, "a panel has runs"
    words = f"{counted(figures.errors.num, 'run')}, mean error {format_percent(figures.errors.mape)}"
    if figures.interval_coverage is None:
        return words
    return f"{words}, {format_percent(figures.interval_coverage, 0)} in the interval"


def _legend(plot: AccuracyPlot, top: float) -> list[Element]:
    """Legend of the marks that occur in the plot."""
    limit, points = plot.largest_ratio, plot.points
    kinds = {point.in_interval for point in points}
    filled, hollow = {"fill": SOFT, "class": "soft"}, {"fill": "none", "stroke": SOFT, "class": "soft"}
    dot = {"cx": "6", "cy": "-4", "r": f"{_RADIUS:g}"}
    entries = []
    if True in kinds:
        entries.append((Element("circle", dot | filled), "measured inside of the 90 % interval"))
    if False in kinds:
        entries.append((Element("circle", dot | hollow), "outside of the interval"))
    if any(not 1 / limit <= point.ratio <= limit for point in points):
        shape = {"d": _triangle(6, -8, up=True)}
        entries.append((Element("path", shape | filled), "error beyond the panel"))
    entries.append((_band(0, -10, 12, 12), f"error at most {100 * _WITHIN:.0f} %"))
    parts, left = [], float(_LEFT)
    for mark, words in entries:
        group = Element("g", {"transform": f"translate({left:g} {top:g})"})
        group.append(mark)
        group.append(soft(18, 0, words))
        parts.append(group)
        left += 18 + 5.8 * len(words) + 26
    return parts


def _band(x: float, y: float, width: float, height: float) -> Element:
    element = rect(x, y, width, height, _BAND)
    element.set("class", "band")
    element.set("fill-opacity", _BAND_OPACITY)
    return element


def _clipped(name: str, width: float) -> str:
    """The name, or its end if it is too long for the panel."""
    name, max_letters = clean(name), int(width / _LETTER_PX)
    return name if len(name) <= max_letters else "…" + name[1 - max_letters :]
