"""Ranks that are forked by a process that has imported torch: a second for a launch instead of ten.

All tests of this folder launch so, but those that ask for the fixture ``torchrun``. The launcher watches and ends
forked ranks as it does torchrun's. What launches in another process (``simplan run``) starts torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

import executor.launch
from tests.forking import ForkServer

__all__ = ["forked_ranks"]

POLL_S = 0.01


@cache
def server() -> ForkServer:
    """The one of this process."""
    return ForkServer("tests.executor.fork_server", executor.launch.rank_environment())


class ForkedAgent:
    """What subprocess.Popen is to torchrun."""

    def __init__(
        self,
        failures: Path,
        module: str,
        args: Sequence[str],
        num_ranks: int,
        log: Path,
        team: None = None,
        max_restarts: int = 0,
    ) -> None:
        assert team is None, "only torchrun meets other nodes"
        assert max_restarts == 0, "only torchrun restarts"
        start = {"failures": str(failures), "log": str(log), "module": module, "args": list(args)}
        environment = executor.launch.rank_environment()
        self.pid: int = server().ask({"start": {**start, "num_ranks": num_ranks, "environment": environment}})
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, when it has ended."""
        if self.returncode is None:
            self.returncode = server().ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked ranks", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def terminate(self) -> None:
        """Asks it to end its ranks and itself."""
        os.kill(self.pid, signal.SIGTERM)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """All launches of this process fork their ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.launch, "start_agent", ForkedAgent)
        yield
