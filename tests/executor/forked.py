"""Ranks that are forked by a process that has imported torch: a second for a launch instead of ten.

All tests of this folder launch so, but those that ask for the fixture ``torchrun``. What launches in another process
(``simplan run``) has torchrun's agent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import executor.launch.launcher
import executor.run
from executor.launch.launcher import Agent, Logs, RankLaunch, rank_environment
from executor.launch.replicas import ReplicaAgent
from tests.forking import ForkServer
from tests.hosts import free_port

POLL_S = 0.01


@cache
def server() -> ForkServer:
    """The one of this process."""
    return ForkServer("tests.executor.fork_server", rank_environment())


class ForkingAgent(Agent):
    """Does once what torchrun's agent does on one node without restarts."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def stop(self) -> None:
        """As said."""
        self._stopped.set()

    def run(self, launch: RankLaunch, logs: Logs) -> None:
        """As said."""
        assert launch.rendezvous is None, "only torchrun meets other nodes"
        number = str(launch.num_ranks)
        common = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "TORCHELASTIC_RESTART_COUNT": "0"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "forked"}
        envs = {k: {**common, "RANK": str(k), "LOCAL_RANK": str(k)} for k in range(launch.num_ranks)}
        made = logs.reify(envs)
        running: dict[int, int] = {}
        try:
            for k, env in envs.items():
                environment = {**rank_environment(), **env, "TORCHELASTIC_ERROR_FILE": made.error_files[k]}
                program = {"module": launch.module, "args": list(launch.args), "environment": environment}
                running[k] = server().ask({"start": {**program, "stdout": made.stdouts[k], "stderr": made.stderrs[k]}})
            self._wait(running, made.error_files)
        finally:
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
                while server().ask({"poll": pid}) is None:
                    time.sleep(POLL_S)

    def _wait(self, running: dict[int, int], error_files: dict[int, str]) -> None:
        failures: dict[int, ProcessFailure] = {}
        while running:
            if self._stopped.is_set():
                raise SignalException("stopped", signal.SIGTERM)
            for k, pid in list(running.items()):
                code = server().ask({"poll": pid})
                if code is None:
                    continue
                del running[k]
                if code:
                    failures[k] = ProcessFailure(k, pid, code, error_files[k])
                    for other in running.values():
                        os.kill(other, signal.SIGTERM)
            time.sleep(POLL_S)
        if failures:
            raise ChildFailedError("forked ranks", failures)


class ForkedReplica:
    """Ranks of one replica; the first that fails ends the others."""

    def __init__(self, running: dict[int, int], error_files: dict[int, str]) -> None:
        self._running, self._error_files = running, error_files
        self._failures: dict[int, ProcessFailure] = {}

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """As torch's."""
        for k, pid in list(self._running.items()):
            code = server().ask({"poll": pid})
            if code is not None:
                del self._running[k]
                if code:
                    self._failures[k] = ProcessFailure(k, pid, code, self._error_files[k])
        if self._failures:
            self.close()
        return None if self._running else RunProcsResult(failures=self._failures)

    def close(self, death_sig: object = None, timeout: int = 30) -> None:
        """As torch's."""
        for pid in self._running.values():
            os.kill(pid, signal.SIGKILL)
            while server().ask({"poll": pid}) is None:
                time.sleep(POLL_S)
        self._running.clear()


class ForkingReplicaAgent(ReplicaAgent):
    """Forks the ranks of replicas."""

    def start(
        self, launch: RankLaunch, logs: Logs, arguments: Sequence[str], envs: dict[int, dict[str, str]]
    ) -> ForkedReplica:
        """As said."""
        made, running = logs.reify(envs), {}
        for k, env in envs.items():
            environment = {**rank_environment(), **env, "TORCHELASTIC_ERROR_FILE": made.error_files[k]}
            program = {"module": launch.module, "args": list(launch.args), "environment": environment}
            running[k] = server().ask({"start": {**program, "stdout": made.stdouts[k], "stderr": made.stderrs[k]}})
        return ForkedReplica(running, made.error_files)


def run_program(name: str, num_ranks: int, folder: Path) -> None:
    """Runs a program of ``rank_programs``, whose arguments are a folder and a rank, on forked ranks to its end."""
    environment = {**rank_environment(), "WORLD_SIZE": str(num_ranks)}
    running: dict[int, int] = {}
    for rank in range(num_ranks):
        program = {"module": f"tests.executor.rank_programs.{name}", "args": [str(folder), str(rank)]}
        files = {stream: str(folder / f"rank{rank}.{stream}") for stream in ("stdout", "stderr")}
        running[rank] = server().ask({"start": {**program, **files, "environment": environment}})
    while running:
        for rank, pid in list(running.items()):
            if (code := server().ask({"poll": pid})) is not None:
                del running[rank]
                assert code == 0, (folder / f"rank{rank}.stderr").read_text()
        time.sleep(POLL_S)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """All launches of this process fork their ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.launch.launcher, "Agent", ForkingAgent)
        patch.setattr(executor.run, "ReplicaAgent", ForkingReplicaAgent)
        yield
