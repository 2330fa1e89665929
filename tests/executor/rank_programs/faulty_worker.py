"""executor.worker with a fault of rank 1, named by TEST_FAULT.

``raise``, ``kill``, ``exit``, ``hang``: at action 1F1 of the third step. ``memory``: the address space may not grow
from action 1F2 on. ``slow``: 0.4 s longer for the first forward of every step.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

import executor.worker
from executor.profiling.memory import process_bytes
from executor.profiling.recorder import Recorder
from simplan.program.action import Action

ROOM_BYTES = 2**20
SLOWER_S = 0.4
FAULT = os.environ.get("TEST_FAULT", "")


class FaultyRecorder(Recorder):
    def open(self, action: Action) -> None:
        super().open(action)
        if FAULT == "slow" and str(action) == "0F0" and os.environ["RANK"] == "1":
            time.sleep(SLOWER_S)

    def begin(self, action: Action) -> None:
        super().begin(action)
        if FAULT == "memory" and str(action) == "1F2":
            limit = process_bytes("VmSize") + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if str(action) != "1F1" or self._step != 2:
            return
        if FAULT == "raise":
            raise RuntimeError("boom")
        if FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "exit":
            os._exit(3)
        if FAULT == "hang":
            time.sleep(3600)


if __name__ == "__main__":
    executor.worker.Recorder = FaultyRecorder  # type: ignore[attr-defined]
    executor.worker.main(sys.argv[1:])
