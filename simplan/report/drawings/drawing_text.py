"""Pipeline drawing as text for terminals and logs: one line per rank, time to the right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from textwrap import wrap

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

MIN_WIDTH = 60
_TICK_WIDTH = 12
_WIDEST_ADVICE = 500  # terminals and logs are not wider
_RECOMPUTE = "≈"
_FILLS = {
    ActionKind.FORWARD: "─",
    ActionKind.BACKWARD: "═",
    ActionKind.BACKWARD_INPUT: "╌",
    ActionKind.BACKWARD_WEIGHT: "▒",
    ActionKind.UNSHARD: "·",
    ActionKind.REDUCE_GRAD: "·",
    ActionKind.OPTIM: "░",
}

Paint = Callable[[str, Box], str]


def drawing_text(drawing: PipelineDrawing, width: int, paint: Paint = lambda text, _: text) -> str:
    """Drawing as lines of text.

    A box begins with its label, or with the letter of its kind where the label and a column behind it do not fit.
    Starts and ends are rounded to whole columns, so each is off by at most half a column. Boxes narrower than a column
    are not drawn, and the last line counts them.

    Args:
        drawing: Drawing of the pipeline step.
        width: Columns of a line, at least ``MIN_WIDTH``.
        paint: Called with the text of every box; may only add characters without width (colors).
    """
    names = [f"rank {row.rank}" for row in drawing.rows]
    left = max(map(len, names))
    figures = _figure_columns(drawing)
    columns = max(10, width - left - 3 - max(map(len, figures)))  # without names, two bars and figures
    lines = [f"{heading(drawing)}; {subheading(drawing)}", ""]
    lines.append(" " * (left + columns + 3) + figures[0])
    for name, row, shown in zip(names, drawing.rows, figures[1:], strict=True):
        boxes = _row(row, drawing, columns, paint)
        lines.append(f"{name:{left}} │{boxes}│{shown}")
    lines.append(" " * (left + 2) + _axis(drawing, columns))
    lines += ["", *_wrapped(_legend(drawing), width)]
    lines += _wrapped(_too_narrow(drawing, columns, width - columns), width)
    return "\n".join(line.rstrip() for line in lines)


def _figure_columns(drawing: PipelineDrawing) -> list[str]:
    """Text to the right of the boxes: a header, and one line per row."""
    cells = [("idle", "in flight"), *(row_figures(row) for row in drawing.rows)]
    if not any(in_flight for _, in_flight in cells[1:]):
        cells = [(idle, "") for idle, _ in cells]
    idle_width, in_flight_width = (max(len(cell[column]) for cell in cells) for column in (0, 1))
    return [f" {idle:>{idle_width}}  {in_flight:>{in_flight_width}}".rstrip() for idle, in_flight in cells]


def _cells(box: Box, drawing: PipelineDrawing, columns: int) -> range:
    """The columns of a box."""
    scale = columns / drawing.step_time_s
    return range(round(box.start_s * scale), round(box.end_s * scale))


def _row(row: DrawnRank, drawing: PipelineDrawing, columns: int, paint: Paint) -> str:
    text, position, letter_end = "", 0, 0
    for box in row.boxes:
        cells = _cells(box, drawing, columns)
        if cells:
            boxed = _box(box, len(cells), drawing, after_letter=letter_end == cells.start > 0)
            text += " " * (cells.start - position) + paint(boxed, box)
            position = cells.stop
            letter_end = position if len(cells) == 1 else 0
    return text + " " * (columns - position)


def _box(box: Box, width: int, drawing: PipelineDrawing, *, after_letter: bool) -> str:
    """Text of a box; directly after a single letter its label has no stage, because B0F1 would be B0 and F1."""
    several_stages = drawing.several_stages and not after_letter
    fitting = (text for text in labels(box, several_stages) if _room(text) <= width)
    label = next(fitting, str(box.action.kind)[0])
    fill = _FILLS[box.action.kind] * width
    recomputing = _RECOMPUTE * round(box.recomputed_share * width)
    return (label + recomputing + fill[len(recomputing) :])[:width]


def _room(label: str) -> int:
    """Columns that a label needs: one more than it has, because F0F1F2 cannot be read."""
    return len(label) + 1


def _axis(drawing: PipelineDrawing, columns: int) -> str:
    line = ""
    for mark in ticks(drawing.step_time_s, max(1, columns // _TICK_WIDTH)):
        line = f"{line:{round(mark.time_s / drawing.step_time_s * columns)}}|{mark.label}"
    return line


def _legend(drawing: PipelineDrawing) -> Iterator[str]:
    for kind in drawing.kinds:
        yield f"{str(kind)[0]}{_FILLS[kind] * 2} {WORDS[kind]}"
    if drawing.recomputes:
        yield f"{_RECOMPUTE}{_RECOMPUTE} recomputing (its share of the box)"
    yield from notes(drawing)


def _too_narrow(drawing: PipelineDrawing, columns: int, margin: int) -> Iterator[str]:
    """Note on boxes or labels that do not fit the width, with a sufficient width."""
    widths = [len(_cells(box, drawing, columns)) for box in drawing.boxes]
    rooms = [
        1 if box.action.microbatch is None else _room(labels(box, drawing.several_stages)[0]) for box in drawing.boxes
    ]
    missing = widths.count(0)
    short = sum(0 < width < room for width, room in zip(widths, rooms, strict=True))
    if not missing and not short:
        return
    needed = max(room / box.duration_s for room, box in zip(rooms, drawing.boxes, strict=True))
    enough = math.ceil(needed * drawing.step_time_s) + margin
    advice = f"--width {enough} or -o FILE.svg" if enough <= _WIDEST_ADVICE else "-o FILE.svg"
    parts = [
        f"{missing} of {len(widths)} boxes are narrower than a column and not drawn" if missing else "",
        f"{short} of {len(widths)} boxes are too narrow for their full label" if short else "",
    ]
    yield f"{', '.join(part for part in parts if part)}: {advice} shows more"


def _wrapped(parts: Iterable[str], width: int) -> Iterator[str]:
    """Parts joined into lines of at most ``width`` columns; a longer part is broken between words."""
    line = ""
    for part in parts:
        if line and len(line) + 3 + len(part) > width:
            yield line
            line = ""
        *full, rest = wrap(part, width)
        yield from full
        line = f"{line}   {rest}" if line else rest
    if line:
        yield line
