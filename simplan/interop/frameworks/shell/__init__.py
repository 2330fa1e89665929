"""Reader of launch scripts, which runs nothing of what it reads."""

from simplan.interop.frameworks.shell.evaluate import Word
from simplan.interop.frameworks.shell.launch import Launch, read_launches

__all__ = ["Launch", "Word", "read_launches"]
