"""Charts as SVG: stacked bars, a map of degrees, and curves; for light and dark pages, and narrow ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from xml.etree import ElementTree

from simplan.explain.charts import Bars, Curve, CurveAxis, Curves, DegreeMap
from simplan.report.drawings.accuracy_svg import COLOURS
from simplan.report.drawings.drawing import clean
from simplan.report.drawings.svg import (
    GRID,
    LANE,
    PART_COLOURS,
    SOFT,
    Element,
    legend,
    line,
    page,
    rect,
    shade,
    soft,
    text,
    written,
)
from simplan.units import format_percent, format_rate, format_span, format_time, format_value

CHART_WIDTH, _MARGIN = 720, 16
_SIZE, _LETTER_PX = 13, 7.3  # of texts, and a mean width of their letters
_BAR, _ROW = 22, 32
_CELL = 46
_soft = partial(soft, size=_SIZE)
_CURVES_HEIGHT = 300
_LABEL_WEIGHT = 9  # of a label that another one would cover, in pieces of a line
_MOST_TICKS = 7


def bars_svg(chart: Bars) -> str:
    """Horizontal stacked bars as an SVG document, 720 px wide, with their sums at the right."""
    left = _MARGIN + 12 + _LETTER_PX * max(len(bar.label) for bar in chart.bars)
    width = CHART_WIDTH - left - 84
    most = max(*(bar.size for bar in chart.bars), chart.limit[0] if chart.limit else 0.0)
    top = 64 if chart.limit else 48
    bottom = top + _ROW * len(chart.bars)
    used = [name for name in chart.names if any(bar.parts.get(name, 0) > 0.002 * most for bar in chart.bars)]
    colours = dict(zip(chart.names, _cycled(len(chart.names)), strict=True)) | PART_COLOURS
    squares, end = legend(
        [(colours[name], name) for name in used], _MARGIN, bottom + 24, CHART_WIDTH - _MARGIN, size=_SIZE
    )
    root = page(clean(chart.title), CHART_WIDTH, end + 16)
    for row, bar in enumerate(chart.bars):
        place, start = top + _ROW * row, left
        root.append(text(left - 10, place + 16, bar.label, size=_SIZE, anchor="end"))
        for name in chart.names:
            size = bar.parts.get(name, 0.0)
            if size > 0:
                group = Element("g", {"class": "part"})
                ElementTree.SubElement(group, "title").text = f"{bar.label}, {name}: {format_value(size, chart.unit)}"
                group.append(rect(start, place, width * size / most, _BAR, colours[name]))
                root.append(group)
                start += width * size / most
    x = math.inf
    if chart.limit:
        x = left + width * chart.limit[0] / most
        mark = line(x, top - 6, x, bottom - 4, SOFT)
        mark.set("stroke-width", "1.5")
        mark.set("stroke-dasharray", "5 4")
        words = f"{chart.limit[1]}, {format_value(chart.limit[0], chart.unit)}"
        anchor = "end" if x > CHART_WIDTH / 2 else "start"
        root.extend([mark, _soft(x, top - 10, words, anchor=anchor)])
    for row, bar in enumerate(chart.bars):
        words, start = format_value(bar.size, chart.unit), left + width * bar.size / most
        if start < x < start + 12 + _LETTER_PX * len(words):
            start = x  # behind the mark, not across it
        root.append(_soft(start + 8, top + _ROW * row + 16, words))
    root.extend(squares)
    return written(root)


def degree_map_svg(chart: DegreeMap) -> str:
    """The map as an SVG document, 720 px wide, a darker cell for a larger fraction."""
    left, top = 84.0, 78.0
    width = (CHART_WIDTH - left - _MARGIN) / len(chart.columns)
    fractions = [cell.fraction for cell in chart.cells.values() if cell.fraction is not None]
    most, least = max(fractions, default=1.0), min(fractions, default=0.0)
    root = page(clean(chart.title), CHART_WIDTH, top + _CELL * len(chart.rows) + 20)
    root.append(_soft(left - 10, top - 8, f"{chart.row_name} \\ {chart.column_name}", anchor="end"))
    for number, column in enumerate(chart.columns):
        words = f"{chart.column_name} {column}"
        root.append(text(left + width * (number + 0.5), top - 8, words, size=_SIZE, anchor="middle"))
    for row_number, row in enumerate(chart.rows):
        y = top + _CELL * row_number
        words = f"{chart.row_name} {row}"
        root.append(text(left - 10, y + _CELL / 2 + 5, words, size=_SIZE, anchor="end"))
        for number, column in enumerate(chart.columns):
            cell = chart.cells[row, column]
            place = left + width * number + 1, y + 1, width - 2, _CELL - 2
            middle = left + width * (number + 0.5), y + _CELL / 2 + 5
            if cell.fraction is None:
                root.append(rect(*place, LANE))
                root.append(_soft(*middle, cell.words, anchor="middle"))
                continue
            share = (cell.fraction - least) / (most - least) if most > least else 1.0
            fill = shade(COLOURS[0], round(100 * (1 - share)), 61)  # half way to white at most, and a little more
            root.append(rect(*place, fill))
            is_best = cell.fraction == most
            words = format_percent(cell.fraction)
            root.append(text(*middle, words, size=15, on=fill, anchor="middle", bold=is_best))
    return written(root)


def curves_svg(chart: Curves) -> str:
    """Curves as an SVG document, 720 px wide, with their names below the axis."""
    parts, height = curve_parts(chart)
    root = page(clean(chart.title), CHART_WIDTH, height, chart.note, size=_SIZE)
    root.extend(parts)
    return written(root)


def curve_parts(chart: Curves) -> tuple[list[Element], float]:
    """Axes and curves from 60 px below the top on, with the names of several curves below; and the height of all."""
    colours, frame = _cycled(len(chart.curves)), _Frame(chart)
    curves = [frame.curve(curve, colour) for curve, colour in zip(chart.curves, colours, strict=True)]
    curves += frame.labels(colours)
    if len(curves) < 2:
        return [*frame.axes(), *curves], frame.bottom + 68
    entries = [(colour, curve.name) for colour, curve in zip(colours, chart.curves, strict=True)]
    names, end = legend(entries, _MARGIN, frame.bottom + 68, CHART_WIDTH - _MARGIN, size=_SIZE)
    return [*frame.axes(), *curves, *names], end + 16


class _Frame:
    """Area of curves, and the coordinates of their points."""

    def __init__(self, chart: Curves) -> None:
        self._chart = chart
        points = [point for curve in chart.curves for point in curve.points]
        self._xs, self._ys = (sorted({point[axis] for point in points}) for axis in (0, 1))
        y = chart.y
        low, high = self._ys[0], self._ys[-1]
        more = (high - low if y.is_near else high) * 0.06
        self._low, self._high = (low / 1.1, high * 1.1) if y.is_log else (low - more if y.is_near else 0.0, high + more)
        self._ticks = ticks_of(y, self._low, self._high)
        self._labels = _labels(y.unit, self._ticks)
        letters = max(map(len, self._labels), default=4)
        self.left, self.top = _MARGIN + 14 + _LETTER_PX * letters, 84.0
        self.width = CHART_WIDTH - self.left - 34
        self.bottom = self.top + _CURVES_HEIGHT

    def x(self, value: float) -> float:
        first, last = self._xs[0], self._xs[-1]
        return self.left + self.width * _share(self._chart.x, value, first, last)

    def y(self, value: float) -> float:
        return self.bottom - _CURVES_HEIGHT * _share(self._chart.y, value, self._low, self._high)

    def axes(self) -> Iterable[Element]:
        yield rect(self.left, self.top, self.width, _CURVES_HEIGHT, "none", stroke=GRID)
        values = ticks_of(self._chart.x, self._xs[0], self._xs[-1])
        for value, words in zip(values, _labels(self._chart.x.unit, values), strict=True):
            x = self.x(value)
            yield line(x, self.top, x, self.bottom, GRID)
            yield _soft(x, self.bottom + 18, words, anchor="middle")
        for value, words in zip(self._ticks, self._labels, strict=True):
            y = self.y(value)
            yield line(self.left, y, self.left + self.width, y, GRID)
            yield _soft(self.left - 8, y + 4, words, anchor="end")
        yield text(self.left, self.top - 10, self._chart.y.name, size=_SIZE)
        middle = self.left + self.width / 2
        yield text(middle, self.bottom + 40, self._chart.x.name, size=_SIZE, anchor="middle")

    def curve(self, curve: Curve, colour: str) -> Element:
        """The line of a curve, with a dot for every point."""
        group = Element("g", {"class": "curve"})
        places = [(self.x(x), self.y(y)) for x, y in curve.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        group.append(Element("path", {"d": path, "fill": "none", "stroke": colour, "stroke-width": "2.5"}))
        for (x, y), point in zip(places, curve.points, strict=True):
            dot = Element("circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3.5", "fill": colour})
            axes = self._chart.x, self._chart.y
            words = (f"{axis.name} {_words(axis.unit, value)}" for axis, value in zip(axes, point, strict=True))
            ElementTree.SubElement(dot, "title").text = f"{curve.name}: {', '.join(words)}"
            group.append(dot)
        return group

    def labels(self, colours: Sequence[str]) -> Iterable[Element]:
        """Labels of all points, each at the corner of its point where it covers the least of lines and other labels."""
        paths = [[(self.x(x), self.y(y)) for x, y in curve.points] for curve in self._chart.curves]
        covered = [point for path in paths for start, end in pairwise(path) for point in _along(start, end)]
        for curve, path, colour in zip(self._chart.curves, paths, colours, strict=True):
            for words, (x, y) in zip(curve.labels, path, strict=False):
                width = _LETTER_PX * len(words)
                sides = [left for left in (x + 6, x - 6 - width) if left + width < CHART_WIDTH - 4]
                corners = [(left, base) for base in (y - 7, y + 16) for left in sides]
                left, base = min(corners, key=lambda corner: _num_inside(covered, corner, width))
                covered += [(left + share * width, base - 5) for share in (0.0, 0.5, 1.0)] * _LABEL_WEIGHT
                yield text(left, base, words, size=_SIZE, colour=colour)


_Point = tuple[float, float]


def _along(start: _Point, end: _Point) -> Iterable[_Point]:
    """Points of a line, 2 px apart or nearer."""
    number = 1 + int(math.dist(start, end) / 2)
    for step in range(number + 1):
        share = step / number
        yield start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def _num_inside(points: Iterable[_Point], start: _Point, width: float) -> int:
    """Number of points that a text covers, whose base line begins at a point."""
    left, base = start
    return sum(left - 2 <= x <= left + width + 2 and base - _SIZE <= y <= base + 2 for x, y in points)


def ticks_of(axis: CurveAxis, first: float, last: float) -> list[float]:
    """Values to label: those of the axis, powers of ten with 2 and 5 times them where few fit, or round steps.

    >>> ticks_of(CurveAxis("", is_log=True), 0.9, 12.0), ticks_of(CurveAxis(""), 0.0, 0.5)
    ([1.0, 2.0, 5.0, 10.0], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    """
    if axis.ticks:
        return [tick for tick in axis.ticks if first <= tick <= last]
    if axis.is_log:
        powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        candidates: list[Sequence[float]] = [
            [float(f"{factor:g}e{power}") for power in powers for factor in factors]
            for factors in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1,))
        ]
        in_range = [[value for value in values if first <= value <= last] for values in candidates]
        return next((values for values in in_range if len(values) <= _MOST_TICKS), in_range[-1])
    power = 10.0 ** math.floor(math.log10((last - first) / _MOST_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * _MOST_TICKS >= last - first)
    start = math.ceil(first / step - 1e-9)
    return [round(number * step, 12) for number in range(start, math.floor(last / step + 1e-9) + 1)]


def _share(axis: CurveAxis, value: float, first: float, last: float) -> float:
    """Position of a value between the ends of its axis."""
    if first == last:
        return 0.5
    return math.log(value / first) / math.log(last / first) if axis.is_log else (value - first) / (last - first)


_FORMATS: dict[str, Callable[[float], str]] = {
    "s": lambda value: "0" if value == 0 else format_time(value, digits=3),
    "span": format_span,
    "bytes/s": format_rate,
    "percent": format_percent,
    "": lambda value: f"{value:,.6g}" if value < 1e6 else f"{value / 1e6:,.6g} M",
}


def _words(unit: str, value: float) -> str:
    return _FORMATS[unit](value) if unit in _FORMATS else format_value(value, unit)


def _labels(unit: str, ticks: Sequence[float]) -> list[str]:
    """Words of ticks; fractions have as many decimals as tell them apart."""
    if unit != "percent":
        return [_words(unit, tick) for tick in ticks]
    labels = ([format_percent(tick, digits) for tick in ticks] for digits in range(4))
    return next((words for words in labels if len({*words}) == len(words)), [_words(unit, tick) for tick in ticks])


def _cycled(number: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(number)]
