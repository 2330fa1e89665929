"""Imports torch once and forks the ranks of every launch; ``forked`` is its client.

``python -m tests.executor.fork_server``: two requests.

- ``{"start": {module, args, stdout, stderr, environment}}`` forks a rank; the answer is its process id.
- ``{"poll": PID}`` is answered by its exit code, negative for a signal, or by null while it runs.

No tensor is computed here: threads of OpenMP or autograd would not exist in the forked ranks.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from executor.launch import rank
from executor.launch.rank import PARENT_VARIABLE, die_with_parent
from tests.forking import fork, serve

WARM = (
    "executor.distributed.pipeline",
    "executor.train.trainer",
    "torch._dynamo",  # DDP and checkpoints import it when they are made
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.optim",
    "torch.profiler",
)
"""What ranks import, executor.worker excepted: it is run as their main program."""


def run_rank(request: dict[str, Any], parent: int) -> int:
    """One rank, as torchrun would start it."""
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with Path(request[name]).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[PARENT_VARIABLE] = str(parent)
    sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    sys.argv = ["", request["module"], *request["args"]]
    rank.main()
    return 0


def answer(request: dict[str, Any]) -> int | None:
    """Starts a rank, or tells how it is."""
    if "start" in request:
        parent = os.getpid()
        return fork(lambda: run_rank(request["start"], parent))
    pid, status = os.waitpid(request["poll"], os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def main() -> None:
    """Answers requests until stdin ends."""
    die_with_parent()
    for module in WARM:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank leaves the pages of what it shares with us alone
    serve(answer)


if __name__ == "__main__":
    main()
