"""Figure of the losses: one panel against samples, one against seconds, a line for each way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from benchmarks.losses.report import curves_of
from simplan.report.drawings.accuracy_svg import COLOURS
from simplan.report.drawings.svg import GRID, PAPER, SOFT, Element, line, page, rect, soft, text, written

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 960, 300, 56, 62, 24
_DASHES = "5 4"
_NUM_POINTS = 100
_TITLE = "Loss of ways to train"


@dataclass(frozen=True, slots=True)
class _Line:
    """Mean over seeds of one way: positions on the horizontal axis, and losses.

    Attributes:
        dashes: Pattern of the line, where colors are used again; empty for none.
    """

    way: str
    colour: str
    dashes: str
    x: NDArray[np.float64]
    losses: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Panel:
    """Area of one panel, in px, and the ranges of its axes."""

    left: float
    width: float
    last_x: float
    least_loss: float
    most_loss: float

    def x(self, value: float) -> float:
        return self.left + self.width * value / self.last_x

    def y(self, loss: float) -> float:
        floor = math.floor(2 * self.least_loss) / 2
        return _TOP + _HEIGHT * (self.most_loss - loss) / (self.most_loss - floor)

    def axes(self, label: str, *, is_first: bool) -> Iterator[Element]:
        """Grid, ticks and the least loss."""
        bottom, right = _TOP + _HEIGHT, self.left + self.width
        for tick in np.arange(math.floor(2 * self.least_loss) / 2, self.most_loss + 0.01, 0.5):
            y = self.y(float(tick))
            yield line(self.left, y, right, y, GRID)
            if is_first:
                yield soft(self.left - 6, y + 4, f"{tick:.1f}", anchor="end")
        for tick in _round_ticks(self.last_x):
            yield line(self.x(tick), _TOP, self.x(tick), bottom, GRID)
            yield soft(self.x(tick), bottom + 16, f"{tick:,.0f}", anchor="middle")
        least = line(self.left, self.y(self.least_loss), right, self.y(self.least_loss), SOFT)
        least.set("stroke-dasharray", _DASHES)
        yield least
        yield soft((self.left + right) / 2, bottom + 36, label, anchor="middle")

    def curve(self, drawn: _Line) -> Element:
        """Line of a way, with a tooltip."""
        points = " ".join(f"{self.x(x):.1f},{self.y(loss):.1f}" for x, loss in zip(drawn.x, drawn.losses, strict=True))
        element = Element("polyline", {"points": points, "fill": "none", "stroke": drawn.colour, "stroke-width": "1.8"})
        if drawn.dashes:
            element.set("stroke-dasharray", drawn.dashes)
        ElementTree.SubElement(element, "title").text = f"{drawn.way}: {drawn.losses[-1]:.3f} at the end"
        return element


def figure(data: Mapping[str, Any]) -> str:
    """The figure as an SVG document, 960 px wide, with a background."""
    by_samples, by_seconds = [*_lines(data, seconds=False)], [*_lines(data, seconds=True)]
    most_loss = max(math.ceil(2 * drawn.losses[0]) / 2 for drawn in by_samples)
    width = (_WIDTH - _LEFT - _GAP - 16) / 2
    height = _TOP + _HEIGHT + 52 + 22 * math.ceil(len(by_samples) / 4)
    words = f"cross-entropy in nats, mean of all seeds; dashed: the best possible model, {data['least_loss']:.3f}"
    root = page(_TITLE, _WIDTH, height, words, left=_LEFT)
    for number, (lines, label) in enumerate(((by_samples, "samples"), (by_seconds, "seconds of training"))):
        last_x = max(float(drawn.x[-1]) for drawn in lines)
        panel = _Panel(_LEFT + number * (width + _GAP), width, last_x, data["least_loss"], most_loss)
        root.extend(panel.axes(label, is_first=number == 0))
        root.extend(map(panel.curve, lines))
    for number, drawn in enumerate(by_samples):
        row, column = divmod(number, 4)
        left, top = _LEFT + column * 222, _TOP + _HEIGHT + 62 + 22 * row
        root.append(rect(left, top - 6, 18, 4, drawn.colour))
        if drawn.dashes:
            root.append(rect(left + 6, top - 6, 6, 4, PAPER))
        root.append(text(left + 24, top, drawn.way))
    return written(root)


def _lines(data: Mapping[str, Any], *, seconds: bool) -> Iterator[_Line]:
    for number, (way, curves) in enumerate(curves_of(data).items()):
        colour, dashes = COLOURS[number % len(COLOURS)], "6 3" if number >= len(COLOURS) else ""
        num_steps = min(len(curve.losses) for curve in curves)  # workers that do not wait have a step more or less
        steps = np.linspace(0, num_steps - 1, _NUM_POINTS).astype(int)
        axis = [(curve.seconds if seconds else curve.num_samples)[:num_steps] for curve in curves]
        losses = np.mean([curve.losses[:num_steps] for curve in curves], axis=0)
        yield _Line(way, colour, dashes, np.mean(axis, axis=0)[steps], losses[steps])


def _round_ticks(highest: float) -> Iterator[float]:
    """Round numbers from 0 on, four to eight."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    distance = next(power * factor for factor in (5, 2, 1) if highest / (power * factor) >= 3)
    for number in range(int(highest / distance) + 1):
        yield number * distance
