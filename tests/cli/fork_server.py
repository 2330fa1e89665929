"""Imports simplan and numba's code once and forks a process for each command: a tenth of a second instead of two.

``python -m tests.cli.fork_server``: a request is ``{args, folder, environment, out, err, limit_s}``, where the output
goes to two files; the answer is the exit code, negative for a signal (SIGALRM: it took longer than ``limit_s``).
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import pkgutil
import signal
from contextlib import redirect_stdout
from typing import Any

import simplan.cli
from tests.forking import fork, serve


def run_command(request: dict[str, Any]) -> int:
    """One command, as ``python -m simplan`` would run it."""
    for descriptor, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(name, flags), descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.alarm(request["limit_s"])
    return simplan.cli.main(request["args"])


def answer(request: dict[str, Any]) -> int:
    """Runs it to its end; its exit code."""
    pid = fork(lambda: run_command(request))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for module in pkgutil.iter_modules(simplan.cli.__path__, "simplan.cli."):  # commands import them when called
        importlib.import_module(module.name)
    with redirect_stdout(io.StringIO()):  # loads the simulators' machine code, which takes most of a small search
        assert simplan.cli.main(["search", "gpt2-124m", "--gpus", "2", "--pp", "2", "--top", "1"]) == 0
    gc.collect()
    gc.freeze()  # a collection in a child leaves the pages of what it shares with us alone
    serve(answer)
