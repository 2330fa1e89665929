"""Reader of launch scripts, which runs nothing of what it reads."""

from simplan.interop.frameworks.shell.evaluate import OTHER_FILE, Word
from simplan.interop.frameworks.shell.launch import TrainingCommand, number_or_text, read_launches

__all__ = ["OTHER_FILE", "TrainingCommand", "Word", "number_or_text", "read_launches"]
