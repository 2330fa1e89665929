"""Imports torch once and forks the ranks of every launch; ``forked`` is its client.

``python -m tests.executor.fork_server``: two requests.

- ``{"start": {failures, log, module, args, num_ranks, environment}}`` forks an agent, which forks the ranks and does
  what ``executor.agent`` does with torchrun; the answer is its process id.
- ``{"poll": PID}`` is answered by its exit code, negative for a signal, or by null while it runs.

No tensor is computed here: threads of OpenMP or autograd would not exist in the forked ranks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from executor import rank_main
from executor.processes import PARENT_VARIABLE, die_with_parent
from tests.forking import fork, serve

WARM = (
    "executor.pipeline",
    "executor.trainer",
    "torch._dynamo",  # DDP and checkpoints import it when they are made
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.optim",
    "torch.profiler",
)
"""What ranks import, executor.worker excepted: it is run as their main program."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_rank(rank: int, port: int, request: dict[str, Any]) -> int:
    """One rank, as torchrun would start it."""
    num_ranks = str(request["num_ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE=num_ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = ["", request["module"], *request["args"]]
    rank_main.main()
    return 0


def run_agent(request: dict[str, Any]) -> int:
    """Forks the ranks and waits; when one fails, the others are asked to end, and all that failed are written down."""
    with Path(os.devnull).open() as nothing, Path(request["log"]).open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    port = free_port()
    running = {fork(lambda rank=rank: run_rank(rank, port, request)): rank for rank in range(request["num_ranks"])}  # type: ignore[misc]

    def ask_to_end() -> None:
        for pid in running:
            os.kill(pid, signal.SIGTERM)

    def interrupted(number: int, frame: FrameType | None) -> None:
        ask_to_end()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, interrupted)
    failures = []
    while running:
        pid, status = os.wait()
        rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            failures.append({"rank": rank, "exitcode": code})
            ask_to_end()
    if failures:
        Path(request["failures"]).write_text(json.dumps(failures))
    return 1 if failures else 0


def answer(request: dict[str, Any]) -> int | None:
    """Starts an agent, or tells how it is."""
    if "start" in request:
        return fork(lambda: run_agent(request["start"]))
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
