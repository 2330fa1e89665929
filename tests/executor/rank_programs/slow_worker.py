"""executor.worker, where rank 1 takes 0.9 s longer for the first forward of every step."""

from __future__ import annotations

import os
import sys
import time

import executor.worker
from executor.profiling.recorder import Recorder
from simplan.program.action import Action

SLOWER_S = 0.9


class SlowRecorder(Recorder):
    def open(self, action: Action) -> None:
        super().open(action)
        if str(action) == "0F0" and os.environ["RANK"] == "1":
            time.sleep(SLOWER_S)


if __name__ == "__main__":
    executor.worker.Recorder = SlowRecorder  # type: ignore[attr-defined]
    executor.worker.main(sys.argv[1:])
