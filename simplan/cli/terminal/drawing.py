"""A pipeline drawn on the terminal, and as a file."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from simplan.cli.terminal.output import coloured
from simplan.errors import Problem, SpecError
from simplan.program.action import ActionKind
from simplan.report.drawings.drawing import Box, PipelineDrawing
from simplan.report.drawings.drawing_text import MIN_WIDTH, drawing_text

_WIDTH_OFF_TERMINAL = 100
_COLOURS = {
    ActionKind.FORWARD: 34,
    ActionKind.BACKWARD: 32,
    ActionKind.BACKWARD_INPUT: 36,
    ActionKind.BACKWARD_WEIGHT: 33,
    ActionKind.UNSHARD: 35,
    ActionKind.REDUCE_GRAD: 35,
    ActionKind.OPTIM: 90,
}


def colored_drawing(drawing: PipelineDrawing, width: int | None) -> str:
    """The drawing at a width or at the terminal's; in color on a terminal unless NO_COLOR is set."""
    in_color = _on_terminal() and not os.environ.get("NO_COLOR")
    return drawing_text(drawing, width or terminal_width(), *[_coloured] * in_color)


def terminal_width() -> int:
    """Columns of a drawing: those of the terminal, at least 60; 100 without one."""
    columns = shutil.get_terminal_size().columns if _on_terminal() else _WIDTH_OFF_TERMINAL
    return max(MIN_WIDTH, columns)


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def refuse_other_suffix(file: Path, option: str = "--output") -> None:
    """Rejects a file name of an option that does not end in ``.svg``.

    Raises:
        SpecError: The file's name does not end in ``.svg``.
    """
    if file.suffix.lower() != ".svg":
        fix = f"write {file.with_suffix('.svg')}" if file.name else "name a file"
        raise SpecError(Problem(field=option, value=str(file), rule="must end in .svg", fix=fix))


def _coloured(text: str, box: Box) -> str:
    return coloured(text, _COLOURS[box.action.kind])
