"""Reader of launch scripts, which runs nothing of what it reads."""

from simplan.interop.frameworks.shell.launch import TrainingCommand, number_or_text, read_launches, read_script
from simplan.interop.frameworks.shell.lexer import OTHER_FILE, own_line
from simplan.interop.frameworks.shell.outputs import doubts, restored, written_file
from simplan.interop.frameworks.shell.unknown import (
    WITHOUT_FILE,
    missing_script,
    only_launch,
    recipe_script,
    unknown_script,
)
from simplan.interop.frameworks.shell.values import Value, Word

__all__ = [
    "OTHER_FILE",
    "WITHOUT_FILE",
    "TrainingCommand",
    "Value",
    "Word",
    "doubts",
    "missing_script",
    "number_or_text",
    "only_launch",
    "own_line",
    "read_launches",
    "read_script",
    "recipe_script",
    "restored",
    "unknown_script",
    "written_file",
]
