"""executor.worker, where rank 1 fails at action 1F1 of the third step in the way that TEST_FAULT names."""

from __future__ import annotations

import os
import signal
import sys
import time

import executor.worker
from executor.profiling.recorder import Recorder
from simplan.program.action import Action


class FailingRecorder(Recorder):
    def begin(self, action: Action) -> None:
        super().begin(action)
        if str(action) == "1F1" and self._step == 2:
            fault = os.environ["TEST_FAULT"]
            if fault == "raise":
                raise RuntimeError("boom")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "exit":
                os._exit(3)
            if fault == "hang":
                time.sleep(3600)


if __name__ == "__main__":
    executor.worker.Recorder = FailingRecorder  # type: ignore[attr-defined]
    executor.worker.main(sys.argv[1:])
