"""dumping_worker with ranks that are late in some of their steps, and the weights of every rank at the end.

TEST_LATE names what they do. ``turns``: in a step of its own, one waits until another one is three steps ahead, and
then another one. ``kill``: the last rank is killed in the third step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import executor.worker
from tests.executor.rank_programs.dumping_worker import DumpingTrainer

LATE = {(0, 2): 0, (3, 0): 1}
"""Step and rank that is late -> rank that gets ahead of it."""
AHEAD = 3


class LateTrainer(DumpingTrainer):
    def step(self, tokens: Any, targets: Any) -> list[torch.Tensor]:
        rank, program = dist.get_rank(), os.environ["TEST_LATE"]
        if program == "turns" and (self.steps_done, rank) in LATE:
            file = Path(sys.argv[2]) / f"rank{LATE[self.steps_done, rank]}.steps.jsonl"
            while not file.exists() or file.read_text().count("\n") < self.steps_done + AHEAD:
                time.sleep(0.01)
        if program == "kill" and (self.steps_done, rank) == (2, dist.get_world_size() - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(tokens, targets)

    def finish(self) -> None:
        super().finish()
        weights = {name: weight for stage in self.stages.values() for name, weight in stage.named_parameters()}
        torch.save(weights, Path(sys.argv[2]) / f"weights.rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    executor.worker.Trainer = LateTrainer  # type: ignore[assignment, attr-defined]
    executor.worker.main(sys.argv[1:])
