"""Predicted over measured timelines as SVG: two lanes per rank on one time axis."""

from __future__ import annotations

from html import escape
from xml.etree import ElementTree

from simplan.program.action import ActionKind
from simplan.report.drawings.comparison_drawing import ComparedRow, ComparisonDrawing
from simplan.report.drawings.drawing import WORDS, Box, clean
from simplan.report.drawings.drawing_svg import COLOURS, fill_of, time_axis
from simplan.report.drawings.svg import DARK, LANE, PAPER, SOFT, Element, legend, line, page, rect, soft, text, written
from simplan.units import format_time
from simplan.validate.activity import ActivityShare, Piece

_WIDTH, _LEFT, _RIGHT, _TOP = 1200, 132, 84, 76
_LANE_HEIGHT, _PAIR_DISTANCE = 26, 66
_STRIPE_HEIGHT = 8
_STRIPES = {ActivityShare.EXPOSED_COMMUNICATION: "#8e44ad", ActivityShare.UNEXPLAINED: "#c0392b"}
_LABEL_PX = 7.0


def comparison_svg(drawing: ComparisonDrawing) -> str:
    """The drawing as an SVG document, 1200 px wide, with a background, for light and dark pages."""
    num_pairs = len(drawing.rows) // 2
    bottom = _TOP + _PAIR_DISTANCE * num_pairs
    heading = f"{clean(drawing.name)}: one step, predicted and measured"
    root = page(heading, _WIDTH, bottom + 84, _subheading(drawing), left=_LEFT)
    for number, row in enumerate(drawing.rows):
        root.extend(_lane(row, _top(number), drawing))
    root.extend(time_axis(drawing.axis_s, _LEFT, _WIDTH - _LEFT - _RIGHT, _TOP - 6, bottom))
    for number, row in enumerate(drawing.rows):
        root.extend(_box(box, row, drawing, _top(number)) for box in row.boxes)
        root.extend(_stripe(piece, drawing, _top(number)) for piece in row.stripes)
        end = _x(row.step_time_s, drawing)
        root.append(line(end, _top(number) - 2, end, _top(number) + _LANE_HEIGHT + 2, DARK))
    kinds = {box.action.kind for row in drawing.rows for box in row.boxes}
    entries = [(COLOURS[kind], f"{kind}: {WORDS[kind]}") for kind in ActionKind if kind in kinds]
    entries += [(colour, share.replace("_", " ")) for share, colour in _STRIPES.items()]
    root.extend(legend([*entries, (LANE, "waiting")], _LEFT, bottom + 50, _WIDTH)[0])
    return written(root)


def comparison_html(drawing: ComparisonDrawing) -> str:
    """Comparison drawing as a separate HTML page."""
    title = f"<title>{escape(clean(drawing.name))}</title>"
    head = f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">{title}</head>\n'
    return f'{head}<body style="margin: 0">\n{comparison_svg(drawing)}</body>\n</html>\n'


def _subheading(drawing: ComparisonDrawing) -> str:
    predicted, measured = (drawing.rows[index].step_time_s for index in (0, 1))
    hidden = f"; {drawing.num_hidden} more ranks are not drawn" if drawing.num_hidden else ""
    return f"predicted {format_time(predicted)}, the recorded step {format_time(measured)}{hidden}"


def _top(number: int) -> float:
    return _TOP + number // 2 * _PAIR_DISTANCE + number % 2 * (_LANE_HEIGHT + 2)


def _x(time_s: float, drawing: ComparisonDrawing) -> float:
    return _LEFT + time_s / drawing.axis_s * (_WIDTH - _LEFT - _RIGHT)


def _lane(row: ComparedRow, top: float, drawing: ComparisonDrawing) -> list[Element]:
    middle = top + _LANE_HEIGHT / 2 + 4
    predicted = row.source == "predicted"
    words = f"rank {row.rank} {row.source}" if predicted else row.source
    end = _x(row.step_time_s, drawing)
    return [
        rect(_LEFT, top, end - _LEFT, _LANE_HEIGHT, LANE),
        text(_LEFT - 8, middle, words, anchor="end", colour=DARK if predicted else SOFT),
        soft(_WIDTH - _RIGHT + 8, middle, format_time(row.step_time_s)),
    ]


def _box(box: Box, row: ComparedRow, drawing: ComparisonDrawing, top: float) -> Element:
    group = Element("g", {"class": "box"})
    left, right = _x(box.start_s, drawing), _x(box.end_s, drawing)
    tooltip = f"{row.source}, rank {row.rank}, {box.action}: {WORDS[box.action.kind]}, {format_time(box.duration_s)}"
    ElementTree.SubElement(group, "title").text = f"{tooltip}, from {format_time(box.start_s)}"
    stages = sorted({drawn.action.stage for drawn in row.boxes})
    fill = fill_of(box.action.kind, stages.index(box.action.stage), len(stages))
    group.append(rect(left, top, right - left, _LANE_HEIGHT, fill, stroke=PAPER if right - left >= 4 else ""))
    label = str(box.action) if box.action.microbatch is not None else ""
    if label and _LABEL_PX * len(label) + 2 <= right - left:
        place = (left + right) / 2, top + _LANE_HEIGHT / 2 + 2
        group.append(text(*place, label, size=10, on=fill, anchor="middle"))
    return group


def _stripe(piece: Piece, drawing: ComparisonDrawing, top: float) -> Element:
    group = Element("g", {"class": "stripe"})
    ElementTree.SubElement(group, "title").text = f"{piece.part}, {format_time(piece.duration_s)}"
    left, right = _x(piece.start_s, drawing), _x(piece.end_s, drawing)
    place = left, top + _LANE_HEIGHT - _STRIPE_HEIGHT
    group.append(rect(*place, right - left, _STRIPE_HEIGHT, _STRIPES[piece.share]))
    return group
