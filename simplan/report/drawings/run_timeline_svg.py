"""Timeline of one run, and the waterfall and the goodput over the checkpoint interval of all, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

from simplan.report.drawings.drawing import clean
from simplan.report.drawings.goodput_svg import COLOURS, WIDTH, goodput_elements
from simplan.report.drawings.run_timeline import (
    RunTimeline,
    TimelineSegment,
    heading,
    kinds_of,
    notes,
    row_figures,
    subheading,
)
from simplan.report.drawings.svg import DARK, GRID, Element, legend, line, page, rect, soft, text, written
from simplan.report.goodput import PARTS, headline
from simplan.units import format_percent, format_span

_LEFT, _RIGHT, _TOP = 72, 120, 84
_BAR, _ROW = 14, 20
_COLUMNS = WIDTH - _LEFT - _RIGHT
_MARK = 3.0


def whole_run_svg(document: Mapping[str, Any], timeline: RunTimeline) -> str:
    """The drawing as an SVG document, 960 px wide.

    Args:
        document: JSON of ``simplan goodput``.
        timeline: One of its runs.
    """
    one_run, end = _elements(timeline)
    all_runs, height = goodput_elements(document, end + 78)
    root = page(heading(timeline), WIDTH, height, subheading(timeline), left=24)
    root.extend(one_run)
    title = f"{clean(timeline.name)}: all {timeline.num_runs:,} runs"
    root.append(text(24, end + 36, title, size=16, bold=True))
    root.append(soft(24, end + 56, headline(document)))
    root.extend(all_runs)
    return written(root)


def run_timeline_svg(timeline: RunTimeline) -> str:
    """The timeline alone as an SVG document, 960 px wide."""
    elements, end = _elements(timeline)
    root = page(heading(timeline), WIDTH, end + 16, subheading(timeline), left=24)
    root.extend(elements)
    return written(root)


def _elements(timeline: RunTimeline) -> tuple[list[Element], float]:
    """Rows, stops and legend below the heading, and the base line of the last line."""
    bottom = _TOP + _ROW * timeline.num_rows
    segments = timeline.segments(_COLUMNS)
    kinds = [(COLOURS[kind], PARTS[kind]) for kind in kinds_of(segments)]
    squares, end = legend(kinds, _LEFT, bottom + 42, WIDTH)
    end += 20
    elements = list(_rows(timeline, bottom))
    elements += [_lane(timeline, segments, row) for row in range(timeline.num_rows)]
    elements += [*_stops(timeline), *squares]
    elements.append(soft(_LEFT, end, "; ".join([*notes(timeline, _COLUMNS), "triangles are stops"])))
    return elements, end


def _rows(timeline: RunTimeline, bottom: float) -> Iterator[Element]:
    """Names and figures of rows, and the axis."""
    yield soft(WIDTH - 70, _TOP - 8, "stops", anchor="end")
    yield soft(WIDTH - 12, _TOP - 8, "done", anchor="end")
    for row, (name, stops, done) in enumerate(row_figures(timeline)):
        base = _TOP + _ROW * row + _BAR - 2
        yield text(_LEFT - 10, base, name, anchor="end")
        yield soft(WIDTH - 70, base, str(stops or ""), anchor="end")
        yield soft(WIDTH - 12, base, format_percent(done), anchor="end")
    length = timeline.row_length
    for at_s, label in length.ticks:
        x = _LEFT + _COLUMNS * at_s / length.length_s
        yield line(x, _TOP - 4, x, bottom, GRID)
        yield soft(x, bottom + 16, label, anchor="middle")


def _lane(timeline: RunTimeline, segments: tuple[TimelineSegment, ...], row: int) -> Element:
    """Bars of a row; compute lies below all others, so that it has no seams."""
    top, scale = _TOP + _ROW * row, _COLUMNS / timeline.row_length.length_s
    group = Element("g", {"class": "row"})
    of_row = [segment for segment in segments if segment.row == row]
    width = scale * of_row[-1].end_s
    group.append(rect(_LEFT, top, width, _BAR, COLOURS["compute"]))
    for segment in of_row:
        if segment.kind == "compute":
            continue
        left, right = scale * segment.start_s, scale * segment.end_s
        bar = rect(_LEFT + left, top, right - left, _BAR, COLOURS[segment.kind])
        ElementTree.SubElement(bar, "title").text = f"{PARTS[segment.kind]}: {format_span(segment.seconds)}"
        group.append(bar)
    return group


def _stops(timeline: RunTimeline) -> Iterator[Element]:
    """A mark above the row for every stop; its tooltip is the cause."""
    length_s = timeline.row_length.length_s
    for stop in timeline.stops:
        row, at_s = divmod(stop.at_s, length_s)
        x, y = _LEFT + _COLUMNS * at_s / length_s, _TOP + _ROW * row
        shape = f"M{x - _MARK:.1f} {y - _MARK - 1:.1f}h{2 * _MARK:g}L{x:.1f} {y:.1f}Z"
        mark = Element("path", {"d": shape, "fill": DARK, "class": "ink"})
        words = f"{stop.cause} after {format_span(stop.at_s)}; goes on from step {stop.step:,.0f}"
        ElementTree.SubElement(mark, "title").text = words
        yield mark
