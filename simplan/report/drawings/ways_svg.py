"""Step time over bandwidth for every way to train, as SVG."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from simplan.explain.ways_map import WayCurve, WaysMap, ticks_of
from simplan.report.drawings.accuracy_svg import COLOURS
from simplan.report.drawings.drawing import clean
from simplan.report.drawings.svg import PAPER, SOFT, Element, line, night_style, picture, rect, text, written
from simplan.units import format_rate, format_time

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 960, 84, 250, 64, 420
_GRID = "#d3d8de"
_LABEL_DISTANCE = 16


def ways_svg(found: WaysMap) -> str:
    """The map as an SVG document, 960 px wide, both axes logarithmic, with names at the slow end of the curves."""
    heading = f"{clean(found.name)}: step time of ways to train"
    height = _TOP + _HEIGHT + 64
    root = picture(heading, _WIDTH, height)
    root.append(night_style())
    root.append(rect(0, 0, _WIDTH, height, PAPER, css="paper"))
    root.append(text(_LEFT, 26, heading, size=16, bold=True, css="ink"))
    root.append(_soft(_LEFT, 46, "a step of one way may be worth fewer samples than that of another"))
    frame = _Frame(found)
    root.extend(frame.axes())
    for number, curve in enumerate(found.drawn):
        root.append(frame.curve(curve, COLOURS[number % len(COLOURS)]))
    root.extend(frame.labels())
    middle = _LEFT + frame.width / 2
    root.append(_soft(middle, _TOP + _HEIGHT + 44, f"{found.link} per device, logarithmic", anchor="middle"))
    return written(root)


class _Frame:
    def __init__(self, found: WaysMap) -> None:
        self._found = found
        times_s = [seconds for curve in found.drawn for seconds in curve.step_times_s]
        self._low_s, self._high_s = min(times_s) / 1.1, max(times_s) * 1.1
        self.width = _WIDTH - _LEFT - _RIGHT

    def x(self, bytes_per_s: float) -> float:
        first, *_, last = self._found.bytes_per_s
        return _LEFT + self.width * math.log(bytes_per_s / first) / math.log(last / first)

    def y(self, seconds: float) -> float:
        share = math.log(seconds / self._low_s) / math.log(self._high_s / self._low_s)
        return _TOP + _HEIGHT * (1 - share)

    def axes(self) -> list[Element]:
        first, *_, last = self._found.bytes_per_s
        parts = [rect(_LEFT, _TOP, self.width, _HEIGHT, "none", stroke=_GRID, css="grid")]
        for rate in ticks_of(first, last):
            x = self.x(rate)
            parts.append(line(x, _TOP, x, _TOP + _HEIGHT, _GRID, css="grid"))
            parts.append(_soft(x, _TOP + _HEIGHT + 18, format_rate(rate), anchor="middle"))
        for seconds in self._times():
            y = self.y(seconds)
            parts.append(line(_LEFT, y, _LEFT + self.width, y, _GRID, css="grid"))
            parts.append(_soft(_LEFT - 8, y + 4, format_time(seconds, digits=3), anchor="end"))
        return parts

    def _times(self) -> list[float]:
        """One, two and five times the powers of ten in the range, or the powers alone for a long one."""
        powers = range(math.floor(math.log10(self._low_s)), math.ceil(math.log10(self._high_s)) + 1)
        steps = (1, 2, 5) if self._high_s / self._low_s < 1e3 else (1,)
        every = [step * 10.0**power for power in powers for step in steps]
        return [seconds for seconds in every if self._low_s <= seconds <= self._high_s]

    def curve(self, curve: WayCurve, colour: str) -> Element:
        """The line of a way, with a dot for every prediction."""
        group = Element("g", {"class": "way"})
        points = [(self.x(r), self.y(s)) for r, s in zip(self._found.bytes_per_s, curve.step_times_s, strict=True)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        group.append(Element("path", {"d": path, "fill": "none", "stroke": colour, "stroke-width": "2"}))
        for (x, y), rate, seconds in zip(points, self._found.bytes_per_s, curve.step_times_s, strict=True):
            dot = Element("circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3", "fill": colour})
            words = f"{curve.name}: {format_time(seconds)} a step at {format_rate(rate)}"
            ElementTree.SubElement(dot, "title").text = words
            group.append(dot)
        return group

    def labels(self) -> list[Element]:
        """Names beside a legend line, in the order of the curves at the lowest bandwidth."""
        drawn = [*enumerate(self._found.drawn)]
        drawn.sort(key=lambda each: -each[1].step_times_s[0])
        left, parts = _LEFT + self.width + 16, []
        for place, (number, curve) in enumerate(drawn):
            y = _TOP + 12 + place * (_LABEL_DISTANCE + 4)
            parts.append(rect(left, y - 9, 14, 10, COLOURS[number % len(COLOURS)]))
            parts.append(text(left + 20, y, curve.name, size=12, css="ink"))
        return parts


def _soft(x: float, y: float, words: str, *, anchor: str = "start") -> Element:
    return text(x, y, words, size=12, colour=SOFT, anchor=anchor, css="soft")
