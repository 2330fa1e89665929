"""A pipeline drawn on the terminal, and as a file."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from simplan.cli.terminal.output import print_result
from simplan.errors import Problem, SpecError
from simplan.program.action import ActionKind
from simplan.report.drawings.drawing import Box, PipelineDrawing
from simplan.report.drawings.drawing_text import MIN_WIDTH, drawing_text

_WIDTH_OFF_TERMINAL = 100
_RESET = "\033[0m"
_COLOURS = {
    ActionKind.FORWARD: "\033[34m",
    ActionKind.BACKWARD: "\033[32m",
    ActionKind.BACKWARD_INPUT: "\033[36m",
    ActionKind.BACKWARD_WEIGHT: "\033[33m",
    ActionKind.UNSHARD: "\033[35m",
    ActionKind.REDUCE_GRAD: "\033[35m",
    ActionKind.OPTIM: "\033[90m",
}


def print_drawing(drawing: PipelineDrawing, width: int | None) -> None:
    """Prints the drawing at a width or at the terminal's; in color on a terminal unless NO_COLOR is set."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if width is None:
        columns = shutil.get_terminal_size((_WIDTH_OFF_TERMINAL, 24)).columns if terminal else _WIDTH_OFF_TERMINAL
        width = max(MIN_WIDTH, columns)
    paint = _coloured if terminal and not os.environ.get("NO_COLOR") else _plain
    print_result(drawing_text(drawing, width, paint))


def refuse_other_suffix(file: Path, option: str = "--output") -> None:
    """Rejects a file name of an option that does not end in ``.svg``.

    Raises:
        SpecError: The file's name does not end in ``.svg``.
    """
    if file.suffix.lower() != ".svg":
        fix = f"write {file.with_suffix('.svg')}" if file.name else "name a file"
        raise SpecError(Problem(field=option, value=str(file), rule="must end in .svg", fix=fix))


def _coloured(text: str, box: Box) -> str:
    return f"{_COLOURS[box.action.kind]}{text}{_RESET}"


def _plain(text: str, box: Box) -> str:
    return text
