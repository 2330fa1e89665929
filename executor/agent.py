"""torchrun, ending with its parent and writing down which ranks failed and how.

Run as ``python -m executor.agent FAILURES.json <arguments of torchrun>``. What torchrun knows about failed ranks
(rank, exit code, or signal) it otherwise only prints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from executor.processes import PARENT_VARIABLE, die_with_parent
from executor.rank import FIRST_RANK_VARIABLE

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Runs torchrun with ``argv[1:]``; returns its exit code.

    ``argv[0]`` is the file that gets a JSON list of ``{rank, exitcode}`` when ranks fail; a negative exit code is a
    signal.
    """
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(argv[1:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        first = int(os.environ[FIRST_RANK_VARIABLE])
        failures = [{"rank": first + f.local_rank, "exitcode": f.exitcode} for f in error.failures.values()]
        Path(argv[0]).write_text(json.dumps(failures))
        return 1
    except SignalException as error:
        return 128 + int(signal.Signals(error.sigval))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
