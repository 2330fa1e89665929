"""The command line: ``simplan COMMAND``. Results go to stdout, progress and messages to stderr."""

from simplan.cli.app import main

__all__ = ["main"]
