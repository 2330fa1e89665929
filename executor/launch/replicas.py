"""Runs replicas that may leave and come back: one that ends does not end the others.

torchrun's agent ends all ranks of a node with any of them. Here every replica has processes of its own, started as the
agent starts them (torch.distributed.elastic.multiprocessing).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from executor.launch.launcher import Agent, Logs, OnLeave, RankLaunch, as_ranks, handlers_restored, logging_to
from executor.launch.roster import Roster, lifeline

_POLL_S = 0.1
_SERVERS = -1  # in the place of a replica's number


class Processes(Protocol):
    """Processes of one replica, as torch's ``PContext``."""

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Result once all have finished or one has failed, which ends the others."""
        ...

    def close(self, death_sig: Any = None, timeout: int = 30) -> None:
        """Ends them."""
        ...


class ReplicaAgent(Agent):
    """Agent of replicas on this node; tests replace ``start`` by a method that forks ranks.

    Args:
        roster: Roster of the run.
        replicas: Replicas of this node.
        servers: Ranks of this node that serve the replicas, with which all of them end.
        max_restarts: Restarts of replicas of this node that have left.
        on_leave: Called for every replica that leaves.
    """

    def __init__(
        self, roster: Roster, replicas: Sequence[int], servers: Sequence[int], max_restarts: int, on_leave: OnLeave
    ) -> None:
        self._roster, self._replicas, self._servers, self._on_leave = roster, replicas, servers, on_leave
        self._restarts_left, self._max_restarts = max_restarts, max_restarts

    def run(self, launch: RankLaunch, logs: Logs) -> None:
        """Returns when all replicas of this node have finished, or left except one that finished.

        Raises:
            ChildFailedError: The last replica of this node has left, or a server has failed.
            SignalException: ``stop`` was called, or this process got a signal; ranks have ended.
        """
        running: dict[int, Processes] = {}
        failed: dict[int, ProcessFailure] = {}
        has_finished = False
        log, cut_off = launch.out_dir / "logs" / "torchrun.log", lifeline(self._roster)
        with as_ranks(launch.rendezvous), handlers_restored(), logging_to(log), cut_off:
            try:
                for replica in self._replicas:
                    running[replica] = self._start(launch, logs, replica, 0)
                if self._servers:
                    running[_SERVERS] = self._start_ranks(launch, logs, "servers", self._servers, 1, 0)
                while running:
                    time.sleep(_POLL_S)
                    for replica, processes in list(running.items()):
                        result = processes.wait(0)
                        if result is None:
                            continue
                        del running[replica]
                        if not result.is_failed():
                            has_finished = has_finished or replica != _SERVERS
                            continue
                        if replica == _SERVERS:
                            failed = {self._servers[k]: failure for k, failure in result.failures.items()}
                            raise ChildFailedError("servers", failed)
                        ranks = self._roster.ranks_of(replica)
                        failed = {ranks[k]: failure for k, failure in result.failures.items()}
                        self._roster.leaves(replica)
                        self._on_leave(ranks, {rank: failure.exitcode for rank, failure in failed.items()})
                        if self._restarts_left and not self._roster.is_finished:
                            self._restarts_left -= 1
                            restarts = self._max_restarts - self._restarts_left
                            running[replica] = self._start(launch, logs, replica, restarts)
            finally:
                for replica, processes in running.items():
                    if replica != _SERVERS:
                        self._roster.leaves(replica)
                    processes.close()
        if failed and not has_finished:
            raise ChildFailedError("replicas", failed)

    def start(
        self, launch: RankLaunch, logs: Logs, arguments: Sequence[str], envs: dict[int, dict[str, str]]
    ) -> Processes:
        """Starts the ranks of a replica.

        Args:
            envs: Environment by place in the replica.
        """
        del launch
        args: dict[int, tuple[Any, ...]] = dict.fromkeys(envs, (*arguments,))
        return start_processes("replica", sys.executable, args, envs, logs)

    def _start(self, launch: RankLaunch, logs: Logs, replica: int, restarts: int) -> Processes:
        ranks, incarnation = self._roster.ranks_of(replica), self._roster.starts(replica)
        return self._start_ranks(launch, logs, f"replica{replica}", ranks, incarnation, restarts)

    def _start_ranks(
        self, launch: RankLaunch, logs: Logs, name: str, ranks: Sequence[int], incarnation: int, restarts: int
    ) -> Processes:
        first = self._roster.ranks_of(self._replicas[0]).start
        common = {
            "WORLD_SIZE": str(launch.num_ranks * (self._roster.num_replicas // len(self._replicas))),
            "LOCAL_WORLD_SIZE": str(launch.num_ranks),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_RUN_ID": "simplan",
            **self._roster.environment(incarnation),
        }
        envs = {k: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank - first)} for k, rank in enumerate(ranks)}
        logs_of_replica = Logs(Path(logs.root_log_dir) / name, logs.on_start)
        arguments = ["-u", "-m", "executor.launch.rank", launch.module, *launch.args]
        return self.start(launch, logs_of_replica, arguments, envs)
