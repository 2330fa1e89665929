"""executor.worker, where the address space of rank 1 may not grow from action 1F2 of the first step on."""

from __future__ import annotations

import os
import resource
import sys

import executor.worker
from executor.profiling.memory import process_bytes
from executor.profiling.recorder import Recorder
from simplan.program.action import Action

ROOM_BYTES = 2**20


class LimitedRecorder(Recorder):
    def begin(self, action: Action) -> None:
        super().begin(action)
        if str(action) == "1F2" and os.environ["RANK"] == "1":
            limit = (process_bytes("VmSize") or 0) + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    executor.worker.Recorder = LimitedRecorder  # type: ignore[attr-defined]
    executor.worker.main(sys.argv[1:])
