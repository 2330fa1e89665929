"""Reader of launch scripts, which runs nothing of what it reads."""

from simplan.interop.frameworks.shell.evaluate import Word
from simplan.interop.frameworks.shell.launch import TrainingCommand, number_or_text, read_launches, read_script
from simplan.interop.frameworks.shell.syntax import OTHER_FILE
from simplan.interop.frameworks.shell.unknown import missing_script, unknown_script

__all__ = [
    "OTHER_FILE",
    "TrainingCommand",
    "Word",
    "missing_script",
    "number_or_text",
    "read_launches",
    "read_script",
    "unknown_script",
]
