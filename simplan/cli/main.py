"""The entry point: runs a command and turns whatever goes wrong into sentences and an exit code.

Exit codes: 0 done (also when the answer is "does not fit"), 1 an expectation failed, 2 bad usage, bad file or invalid
plan, 3 no feasible plan, 4 a run failed, 70 a bug of simplan, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer

from simplan.cli.app import app
from simplan.cli.terminal.output import complain
from simplan.errors import SimplanError

__all__ = ["main"]

_BAD_USAGE = 2
_BUG = 70
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments after the program's name; None takes those of this process.

    Returns:
        The exit code.
    """
    try:
        code = app(args=None if argv is None else list(argv), prog_name="simplan", standalone_mode=False)
    except SimplanError as error:
        complain(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return _INTERRUPTED
    except OSError as error:
        complain(f"{error.filename or 'what is printed cannot be written'}: {error.strerror or error}")
        return _BAD_USAGE
    except Exception as error:
        if hasattr(error, "format_message"):  # bad usage; the class's place differs between versions of typer
            complain(f"{error.format_message()}\n`simplan --help` and `simplan COMMAND --help` list what there is")
            return _BAD_USAGE
        if os.environ.get("SIMPLAN_DEBUG"):
            raise
        complain(
            f"this is a bug of simplan ({type(error).__name__}: {error}); "
            "with SIMPLAN_DEBUG=1 in the environment it shows where, please report that"
        )
        return _BUG
    if code == _INTERRUPTED:
        complain("interrupted")
    return code if isinstance(code, int) else 0
