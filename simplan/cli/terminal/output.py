"""Output of text: results go to stdout, all else to stderr, colors only to terminals."""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from simplan.wording import visible

_BOLD, _RED, _GREEN = 1, 31, 32
_OWN = secrets.token_hex(8)
"""Stands before our own colors until they are printed: no file can have it, so that its own colors are not ours."""
_IN_ASCII = str.maketrans("─═╌▒░│·≈…", "-=~%:|.^.")
"""ASCII replacements for the characters of drawings, for terminals without Unicode."""


def print_result(text: str) -> None:
    """A result, to stdout. A reader that has gone away (``| head``) is no error."""
    _print(text, sys.stdout)


def print_json(document: dict[str, Any]) -> None:
    """A result as one JSON document, to stdout."""
    print_result(json.dumps(document, indent=1, allow_nan=False))


def write_result(document: dict[str, Any], *, as_json: bool, output: Path | None) -> bool:
    """Write a result to the file of ``-o`` and, with ``--json``, to stdout; returns True if its text is to be printed.

    Raises:
        SpecError: The file cannot be written.
    """
    if output is not None:
        from simplan.io import write_json  # not imported for help and errors

        write_json(output, document)
    if as_json:
        print_json(document)
    return not as_json


def say(text: str) -> None:
    """Prints a line to stderr; where it cannot be written, nobody can be told, and the exit code says the rest."""
    with suppress(OSError):
        _print(text, sys.stderr)


def complain(text: str) -> None:
    """Errors, to stderr, a line each."""
    say("\n".join(f"error: {line}" for line in text.splitlines() or [""]))


def emphasize(text: str, good: bool | None = None) -> str:
    """Bold, and green or red, when stdout is a terminal and NO_COLOR is not set; else the text as it is."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return coloured(text, _BOLD, *(() if good is None else (_GREEN if good else _RED,)))


def coloured(text: str, *codes: int) -> str:
    """Text in a color of the terminal, for ``print_result``.

    Args:
        codes: Numbers of ANSI's select graphic rendition, e.g. 1 for bold and 31 for red.
    """
    return f"{''.join(f'{_OWN}[{code}m' for code in codes)}{text}{_OWN}[0m"


def _print(text: str, stream: TextIO | None) -> None:
    if stream is None:  # as a shell's >&- leaves it
        raise OSError(errno.EBADF, "its stream is closed")
    text = visible(text).replace(_OWN, "\033")
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # discard buffered output, so that the interpreter's flush at exit does not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except UnicodeEncodeError:
        print(text.translate(_IN_ASCII).encode("ascii", "replace").decode(), file=stream, flush=True)
