"""The command line: ``simplan COMMAND``. Results go to stdout; progress, notes and errors go to stderr."""

from simplan.cli.app import main

__all__ = ["main"]
