"""executor.worker whose server writes what it applies to ``served.pt``, with a fault named by TEST_FAULT.

``slow``: worker 1 takes 0.15 s longer for every step. ``kill_worker``: worker 1 is killed in its third exchange.
``leave``: the same, at its first start only; the others wait in their sixth exchange until it has come back.
``kill_server``: the server is killed at its fifth update. ``same_batch``: all steps of a worker have its first batch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import executor.train.asynchronous
import executor.worker
from executor.launch.roster import Roster
from executor.train.asynchronous import WorkerTrainer
from executor.train.parameter_server import HEADER, ParameterServer, ServerClient
from simplan.runs.measurement import MeasuredUpdate

SLOWER_S = 0.15
FAULT = os.environ.get("TEST_FAULT", "")
FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


class RecordedServer(ParameterServer):
    """Records gradients in the order in which they are applied."""

    def start(self) -> None:
        """As said."""
        super().start()
        self.first, self.applied = self._flat(), list[tuple[int, Tensor]]()

    def _apply(self, worker: int, message: Tensor) -> None:
        self.applied.append((worker, message[HEADER:].clone()))
        if FAULT == "kill_server" and len(self.applied) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._apply(worker, message)

    def serve(self, on_poll: Callable[[int], None]) -> None:
        """As said."""
        super().serve(on_poll)
        torch.save({"first": self.first, "applied": self.applied, "last": self._flat()}, FOLDER / "served.pt")

    def _flat(self) -> Tensor:
        return torch.cat([parameter.detach().clone() for parameter in self.parameters])


class FaultyClient(ServerClient):
    """Client of a worker with a fault."""

    exchanges = 0

    def exchange(self) -> tuple[MeasuredUpdate, ...]:
        """As said."""
        self.exchanges += 1
        if self._worker == 1 and FAULT == "slow":
            time.sleep(SLOWER_S)
        if self._worker == 1 and FAULT == "kill_worker" and self.exchanges == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "leave":
            self._leave_once()
        return super().exchange()

    def _leave_once(self) -> None:
        roster, incarnation = Roster.of_rank(3, 1)
        if self._worker == 1 and incarnation == 1 and self.exchanges == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while self._worker != 1 and self.exchanges == 6 and not roster.store.check(["connects/1.2"]):
            time.sleep(0.05)


class SameBatch(WorkerTrainer):
    """Worker that trains on its first batch only."""

    def batch(self, step: int) -> Any:
        """As said."""
        return super().batch(0)


if __name__ == "__main__":
    if FAULT == "same_batch":
        executor.train.asynchronous.WorkerTrainer = SameBatch  # type: ignore[misc]
    executor.train.asynchronous.ParameterServer = RecordedServer  # type: ignore[attr-defined]
    executor.train.asynchronous.ServerClient = FaultyClient  # type: ignore[attr-defined]
    executor.worker.main(sys.argv[1:])
