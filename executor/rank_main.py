"""Where every rank starts: ``python -m executor.rank_main MODULE ARGS``, started by torchrun.

Ties the rank's life to torchrun's before the rank's program is imported: importing torch takes seconds, in which
torchrun may be killed. That is why this module imports next to nothing.
"""

from __future__ import annotations

import runpy
import sys

from executor.processes import die_with_parent

__all__ = ["main"]


def main() -> None:
    """Runs the module named by the first argument as the main program, with the arguments after it."""
    die_with_parent()
    del sys.argv[0]  # run_module puts the path of the module into the new first place
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
