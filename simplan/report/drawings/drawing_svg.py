"""Pipeline drawing as SVG: hue for the kind of action, shade for the stage, number for the microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree

from simplan.program.action import ActionKind
from simplan.report.drawings.drawing import (
    WORDS,
    Box,
    DrawnRank,
    PipelineDrawing,
    heading,
    labels,
    notes,
    row_figures,
    subheading,
    ticks,
)
from simplan.report.drawings.svg import (
    DARK,
    PAPER,
    SOFT,
    Element,
    line,
    night_style,
    picture,
    rect,
    shade,
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

LANE, GRID = "#eef0f3", "#c9ced6"
_WIDTH, _LEFT, _RIGHT, _TOP = 1200, 76, 128, 84
_ROW_HEIGHT, _ROW_DISTANCE = 28, 34
_TICK_DISTANCE = 100
_DIGIT_PX, _LETTER_PX, _W_PX, _LEGEND_PX = 6.0, 6.9, 9.6, 6.4  # in labels of 10 px; in the legend of 12 px, a mean
_OUTLINED_PX = 4.0  # narrower boxes have no outline, which would hide them


def drawing_svg(drawing: PipelineDrawing) -> str:
    """The drawing as an SVG document, 1200 px wide, with a background."""
    bottom = _TOP + _ROW_DISTANCE * len(drawing.rows)
    legend = _legend(drawing, bottom + 34)
    height = max(float(part.get("y", 0)) for part in legend) + 24
    root = picture(heading(drawing), _WIDTH, height)
    root.append(_recompute_pattern())
    root.append(rect(0, 0, _WIDTH, height, PAPER))
    root.append(text(_LEFT, 26, heading(drawing), size=16, bold=True))
    root.append(text(_LEFT, 46, subheading(drawing), size=12, colour=SOFT))
    root.append(text(_WIDTH - _RIGHT + 64, _TOP - 10, "idle", size=12, colour=SOFT, anchor="end"))
    if any(row.activations_in_flight for row in drawing.rows):
        root.append(text(_WIDTH - 10, _TOP - 10, "in flight", size=12, colour=SOFT, anchor="end"))
    for number, row in enumerate(drawing.rows):
        root.extend(_lane(row, _TOP + number * _ROW_DISTANCE))
    root.extend(time_axis(drawing.step_time_s, _LEFT, _WIDTH - _LEFT - _RIGHT, _TOP - 4, bottom))
    for number, row in enumerate(drawing.rows):
        for box in row.boxes:
            ends = _x(box.start_s, drawing), _x(box.end_s, drawing)
            root.append(_box(box, row, _labels(box, drawing), ends, _TOP + number * _ROW_DISTANCE, _ROW_HEIGHT))
    root.extend(legend)
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
    height = bottom + 44 + 20 * math.ceil(len(kinds) / 3)
    root = picture(title, _SIDE_WIDTH, height)
    root.append(night_style())
    root.append(rect(0, 0, _SIDE_WIDTH, height, PAPER, css="paper"))
    root.append(text(16, 26, title, size=16, bold=True, css="ink"))
    root.extend(time_axis(longest_s, _SIDE_LEFT, longest_s * scale, 46, bottom - 8))
    top = 44.0
    for (name, drawing), own_height in zip(drawings.items(), heights, strict=True):
        words = f"{name}: {format_time(drawing.step_time_s)}, idle {format_percent(drawing.idle_fraction)}"
        root.append(rect(14, top + 8, 8 * len(words), 18, PAPER, css="paper"))
        root.append(text(16, top + 22, words, size=13, bold=True, css="ink"))
        for number, row in enumerate(drawing.rows):
            y = top + 32 + _SIDE_DISTANCE * number
            lane = rect(_SIDE_LEFT, y, drawing.step_time_s * scale, _SIDE_ROW, LANE, css="node")
            root.extend([lane, text(_SIDE_LEFT - 8, y + 15, f"rank {row.rank}", size=12, anchor="end", css="ink")])
            for box in row.boxes:
                ends = _SIDE_LEFT + box.start_s * scale, _SIDE_LEFT + box.end_s * scale
                label = "" if box.action.microbatch is None else str(box.action.microbatch)
                root.append(_box(box, row, (label,), ends, y, _SIDE_ROW))
        top += own_height
    for number, kind in enumerate(kinds):
        words, left = f"{kind}: {WORDS[kind]}", _SIDE_LEFT + 310 * (number % 3)
        y = bottom + 22 + 20 * (number // 3)
        root.append(rect(left, y, 12, 12, COLOURS[kind]))
        root.append(text(left + 17, y + 10, words, size=12, css="ink"))
    shades = "; lighter: a later stage of the same rank" if several else ""
    words = f"numbers are microbatches; idle: from the first to the last computation{shades}"
    root.append(text(_SIDE_LEFT, height - 12, words, size=12, colour=SOFT, css="soft"))
    return written(root)


def fill_of(kind: ActionKind, place: int, num_stages: int) -> str:
    """Color of a box: the hue of the action kind, lighter for later stages of the rank (``place`` counts from 0)."""
    return shade(COLOURS[kind], place, num_stages)


def ink_on(fill: str) -> str:
    """Black or white, whichever has the larger contrast (relative luminance as in WCAG 2.2)."""
    linear = []
    for start in (1, 3, 5):
        channel = int(fill[start : start + 2], 16) / 255
        linear.append(channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return DARK if luminance > 0.179 else PAPER  # (1 + 0.05) / (x + 0.05) = (x + 0.05) / 0.05


def _lane(row: DrawnRank, top: float) -> list[Element]:
    idle, in_flight = row_figures(row)
    middle = top + _ROW_HEIGHT / 2 + 4
    return [
        rect(_LEFT, top, _WIDTH - _LEFT - _RIGHT, _ROW_HEIGHT, LANE),
        text(_LEFT - 8, middle, f"rank {row.rank}", size=12, anchor="end"),
        text(_WIDTH - _RIGHT + 64, middle, idle, size=12, anchor="end"),
        text(_WIDTH - 10, middle, in_flight, size=12, anchor="end"),
    ]


def time_axis(length_s: float, left: float, width: float, top: float, bottom: float) -> Iterator[Element]:
    """Grid lines and labels of the time axis.

    Args:
        length_s: Time at the right end of the axis.
        left, width, top, bottom: Area of the drawing in px.
    """
    for tick in ticks(length_s, int(width // _TICK_DISTANCE)):
        x = left + tick.time_s / length_s * width
        yield line(x, top, x, bottom, GRID, css="grid")
        yield text(x, bottom + 14, tick.label, size=12, colour=SOFT, anchor="middle", css="soft")


def _box(
    box: Box, row: DrawnRank, names: tuple[str, ...], ends: tuple[float, float], top: float, row_height: float
) -> Element:
    """SVG group of a box between two ends: tooltip, rectangle, recomputed part, and the first label that fits."""
    group = Element("g", {"class": "box"})
    ElementTree.SubElement(group, "title").text = _tooltip(box)
    left, right = ends
    fill = fill_of(box.action.kind, row.stages.index(box.action.stage), len(row.stages))
    outline = PAPER if right - left >= _OUTLINED_PX else None
    group.append(rect(left, top, right - left, row_height, fill, stroke=outline))
    if box.recompute_s > 0:
        height = row_height * box.recomputed_share
        group.append(rect(left, top + row_height - height, right - left, height, "url(#recompute)"))
    label = next((name for name in names if _label_width(name) + 2 <= right - left), "")
    if label:
        middle = (left + right) / 2
        group.append(text(middle, top + row_height / 2 + 4, label, size=10, colour=ink_on(fill), anchor="middle"))
    return group


def _labels(box: Box, drawing: PipelineDrawing) -> tuple[str, ...]:
    """Labels of a box, the longest first, at least the number of its microbatch."""
    number = () if box.action.microbatch is None else (str(box.action.microbatch),)
    return (*labels(box, drawing.several_stages), *number)


def _label_width(text: str) -> float:
    num_digits, num_w = sum(character.isdigit() for character in text), text.count("W")
    return _DIGIT_PX * num_digits + _W_PX * num_w + _LETTER_PX * (len(text) - num_digits - num_w)


def _tooltip(box: Box) -> str:
    stage, microbatch = box.action.stage, box.action.microbatch
    of = f"microbatch {microbatch} on stage {stage}" if microbatch is not None else f"stage {stage}"
    recomputing = f", {format_time(box.recompute_s)} of it recomputing" if box.recompute_s > 0 else ""
    return (
        f"{box.action}: {WORDS[box.action.kind]}, {of}; "
        f"starts at {format_time(box.start_s)}, takes {format_time(box.duration_s)}{recomputing}"
    )


def _legend(drawing: PipelineDrawing, top: float) -> list[Element]:
    """Legend: color swatches, wrapped to the width, and an explanation of the figures below them."""
    entries = [(COLOURS[kind], False, f"{kind}: {WORDS[kind]}") for kind in drawing.kinds]
    if drawing.recomputes:
        entries.append((COLOURS[ActionKind.BACKWARD], True, "recomputing (its share of the box)"))
    entries.append((LANE, False, "idle"))
    parts, left = [], float(_LEFT)
    for fill, hatched, words in entries:
        width = 18 + _LEGEND_PX * len(words) + 18
        if left + width > _WIDTH and left > _LEFT:
            left, top = float(_LEFT), top + 20
        parts.append(rect(left, top, 12, 12, fill, stroke=GRID if fill == LANE else None))
        if hatched:
            parts.append(rect(left, top, 12, 12, "url(#recompute)"))
        parts.append(text(left + 18, top + 10, words, size=12))
        left += width
    shades = ["lighter: a later stage of the same rank"] if drawing.several_stages else []
    for number, note in enumerate([*shades, *notes(drawing)], start=1):
        parts.append(text(_LEFT, top + 14 + 18 * number, note, size=12, colour=SOFT))
    return parts


def _x(time_s: float, drawing: PipelineDrawing) -> float:
    return _LEFT + time_s / drawing.step_time_s * (_WIDTH - _LEFT - _RIGHT)


def _recompute_pattern() -> Element:
    size = {"width": "5", "height": "5", "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = Element("pattern", {"id": "recompute", **size})
    ElementTree.SubElement(pattern, "rect", {"width": "2", "height": "5", "fill": PAPER, "fill-opacity": "0.6"})
    definitions = Element("defs")
    definitions.append(pattern)
    return definitions
