"""Pipeline drawing as SVG: hue for the kind of action, shade for the stage, number for the microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from xml.etree import ElementTree

from simplan.program.action import ActionKind
from simplan.report.drawings.drawing import (
    WORDS,
    Box,
    DrawnRank,
    PipelineDrawing,
    box_facts,
    heading,
    labels,
    notes,
    row_figures,
    subheading,
    ticks,
)
from simplan.report.drawings.svg import (
    GRID,
    LANE,
    PAPER,
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
from simplan.units import format_percent, format_time

COLOURS = {
    ActionKind.FORWARD: "#3b7dd8",
    ActionKind.BACKWARD: "#e5892b",
    ActionKind.BACKWARD_INPUT: "#1abc9c",
    ActionKind.BACKWARD_WEIGHT: "#3a7d2c",
    ActionKind.UNSHARD: "#a79bc9",
    ActionKind.REDUCE_GRAD: "#a79bc9",
    ActionKind.OPTIM: "#6b7078",
}
"""Fill of a rank's first stage, in every drawing; they differ for people who miss one kind of cone, too."""

_WIDTH, _LEFT, _RIGHT, _TOP = 1200, 76, 128, 84
_ROW_HEIGHT, _ROW_DISTANCE = 28, 34
_TICK_DISTANCE = 100
_DIGIT_PX, _LETTER_PX, _W_PX = 6.0, 6.9, 9.6  # in labels of 10 px
_OUTLINED_PX = 4.0  # narrower boxes have no outline, which would hide them


def drawing_svg(drawing: PipelineDrawing) -> str:
    """The drawing as an SVG document, 1200 px wide, with a background."""
    bottom = _TOP + _ROW_DISTANCE * len(drawing.rows)
    below = _below(drawing, bottom + 44)
    height = max(float(part.get("y", 0)) for part in below) + 24
    root = page(heading(drawing), _WIDTH, height, subheading(drawing), left=_LEFT)
    root.append(_recompute_pattern())
    root.append(soft(_WIDTH - _RIGHT + 64, _TOP - 10, "idle", anchor="end"))
    if any(row.activations_in_flight for row in drawing.rows):
        root.append(soft(_WIDTH - 10, _TOP - 10, "in flight", anchor="end"))
    for number, row in enumerate(drawing.rows):
        root.extend(_lane(row, _TOP + number * _ROW_DISTANCE))
    root.extend(time_axis(drawing.step_time_s, _LEFT, _WIDTH - _LEFT - _RIGHT, _TOP - 4, bottom, drawing.unit))
    for number, row in enumerate(drawing.rows):
        for box in row.boxes:
            ends = _x(box.start_s, drawing), _x(box.end_s, drawing)
            top = _TOP + number * _ROW_DISTANCE
            root.append(_box(box, row, _labels(box, drawing), ends, top, _ROW_HEIGHT, drawing.unit))
    root.extend(below)
    return written(root)


_SIDE_WIDTH, _SIDE_LEFT, _SIDE_ROW, _SIDE_DISTANCE = 960, 64, 22, 25


def schedules_svg(title: str, drawings: Mapping[str, PipelineDrawing]) -> str:
    """Several steps below each other on one time axis, as an SVG document, 960 px wide, for light and dark pages.

    Args:
        title: Heading.
        drawings: Steps by name.
    """
    longest_s = max(drawing.step_time_s for drawing in drawings.values())
    scale = (_SIDE_WIDTH - _SIDE_LEFT - 16) / longest_s
    kinds = [kind for kind in ActionKind if any(kind in drawing.kinds for drawing in drawings.values())]
    several = any(drawing.several_stages for drawing in drawings.values())
    heights = [_SIDE_DISTANCE * len(drawing.rows) + 40 for drawing in drawings.values()]
    bottom = 44 + sum(heights)
    squares, end = legend(_kinds(kinds), _SIDE_LEFT, bottom + 32, _SIDE_WIDTH)
    root = page(title, _SIDE_WIDTH, end + 34)
    root.extend(time_axis(longest_s, _SIDE_LEFT, longest_s * scale, 46, bottom - 8))
    top = 44.0
    for (name, drawing), own_height in zip(drawings.items(), heights, strict=True):
        words = f"{name}: {format_time(drawing.step_time_s)}, idle {format_percent(drawing.idle_fraction)}"
        root.append(rect(14, top + 8, 8 * len(words), 18, PAPER))
        root.append(text(16, top + 22, words, size=13, bold=True))
        for number, row in enumerate(drawing.rows):
            y = top + 32 + _SIDE_DISTANCE * number
            lane = rect(_SIDE_LEFT, y, drawing.step_time_s * scale, _SIDE_ROW, LANE)
            root.extend([lane, text(_SIDE_LEFT - 8, y + 15, f"rank {row.rank}", anchor="end")])
            for box in row.boxes:
                ends = _SIDE_LEFT + box.start_s * scale, _SIDE_LEFT + box.end_s * scale
                label = "" if box.action.microbatch is None else str(box.action.microbatch)
                root.append(_box(box, row, (label,), ends, y, _SIDE_ROW))
        top += own_height
    root.extend(squares)
    shades = "; lighter: a later stage of the same rank" if several else ""
    words = f"numbers are microbatches; idle: from the first to the last computation{shades}"
    root.append(soft(_SIDE_LEFT, end + 22, words))
    return written(root)


def fill_of(kind: ActionKind, place: int, num_stages: int) -> str:
    """Color of a box: the hue of the action kind, lighter for later stages of the rank (``place`` counts from 0)."""
    return shade(COLOURS[kind], place, num_stages)


def _lane(row: DrawnRank, top: float) -> list[Element]:
    idle, in_flight = row_figures(row)
    middle = top + _ROW_HEIGHT / 2 + 4
    return [
        rect(_LEFT, top, _WIDTH - _LEFT - _RIGHT, _ROW_HEIGHT, LANE),
        text(_LEFT - 8, middle, f"rank {row.rank}", anchor="end"),
        text(_WIDTH - _RIGHT + 64, middle, idle, anchor="end"),
        text(_WIDTH - 10, middle, in_flight, anchor="end"),
    ]


def time_axis(
    length_s: float, left: float, width: float, top: float, bottom: float, unit: str = ""
) -> Iterator[Element]:
    """Grid lines and labels of the time axis.

    Args:
        length_s: Time at the right end of the axis.
        left, width, top, bottom: Area of the drawing in px.
        unit: As of a drawing.
    """
    for tick in ticks(length_s, int(width // _TICK_DISTANCE), unit):
        x = left + tick.time_s / length_s * width
        yield line(x, top, x, bottom, GRID)
        yield soft(x, bottom + 14, tick.label, anchor="middle")


def _box(
    box: Box,
    row: DrawnRank,
    names: tuple[str, ...],
    ends: tuple[float, float],
    top: float,
    row_height: float,
    unit: str = "",
) -> Element:
    """SVG group of a box between two ends: tooltip, rectangle, recomputed part, and the first label that fits."""
    group = Element("g", {"class": "box"})
    ElementTree.SubElement(group, "title").text = _tooltip(box, unit)
    left, right = ends
    fill = fill_of(box.action.kind, row.stages.index(box.action.stage), len(row.stages))
    outline = PAPER if right - left >= _OUTLINED_PX else ""
    group.append(rect(left, top, right - left, row_height, fill, stroke=outline))
    if box.recompute_s > 0:
        height = row_height * box.recomputed_share
        group.append(rect(left, top + row_height - height, right - left, height, "url(#recompute)"))
    label = next((name for name in names if _label_width(name) + 2 <= right - left), "")
    if label:
        middle = (left + right) / 2
        group.append(text(middle, top + row_height / 2 + 4, label, size=10, on=fill, anchor="middle"))
    return group


def _labels(box: Box, drawing: PipelineDrawing) -> tuple[str, ...]:
    """Labels of a box, the longest first, at least the number of its microbatch."""
    number = () if box.action.microbatch is None else (str(box.action.microbatch),)
    return (*labels(box, drawing.several_stages), *number)


def _label_width(text: str) -> float:
    num_digits, num_w = sum(character.isdigit() for character in text), text.count("W")
    return _DIGIT_PX * num_digits + _W_PX * num_w + _LETTER_PX * (len(text) - num_digits - num_w)


def _tooltip(box: Box, unit: str) -> str:
    of, *times = box_facts(box, unit)
    return f"{box.action}: {WORDS[box.action.kind]}, {of}; {', '.join(times)}"


def _kinds(kinds: Iterable[ActionKind]) -> list[tuple[str, str]]:
    return [(COLOURS[kind], f"{kind}: {WORDS[kind]}") for kind in kinds]


def _below(drawing: PipelineDrawing, base: float) -> list[Element]:
    """Meaning of the colors, and of the figures."""
    recomputing = [(COLOURS[ActionKind.BACKWARD], "recomputing (its share of the box)")] * drawing.recomputes
    parts, base = legend([*_kinds(drawing.kinds), (LANE, "idle"), *recomputing], _LEFT, base, _WIDTH)
    if recomputing:
        parts.append(Element("rect", parts[-2].attrib | {"fill": "url(#recompute)"}))
    shades = ["lighter: a later stage of the same rank"] * drawing.several_stages
    return parts + [
        soft(_LEFT, base + 4 + 18 * number, note) for number, note in enumerate([*shades, *notes(drawing)], 1)
    ]


def _x(time_s: float, drawing: PipelineDrawing) -> float:
    return _LEFT + time_s / drawing.step_time_s * (_WIDTH - _LEFT - _RIGHT)


def _recompute_pattern() -> Element:
    size = {"width": "5", "height": "5", "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = Element("pattern", {"id": "recompute", **size})
    ElementTree.SubElement(pattern, "rect", {"width": "2", "height": "5", "fill": PAPER, "fill-opacity": "0.6"})
    definitions = Element("defs")
    definitions.append(pattern)
    return definitions
