"""executor.worker whose replica 1 is killed once, and which writes the weights of every rank after every step.

TEST_LEAVES says when that is. ``step``: in a step of the second round. ``average``: when the members of the second
outer step are agreed on. ``mean``: when it has their mean, and the others do not know yet. ``kept``: when all know.
With TEST_RETURNS the others wait, before the fourth round, until replica 1 asks to be taken in.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import executor.distributed.replicas.membership
import executor.worker
from executor.distributed.replicas.membership import Meeting, Membership
from executor.train.trainer import Trainer

LEAVES = os.environ.get("TEST_LEAVES", "")  # doctest imports this file, too
INNER_STEPS = 3


class LeavingMembership(Membership):
    """Membership of a rank that may be killed."""

    def kill(self, when: str, number: int) -> None:
        """Kills the first rank of replica 1, if this is it and the time has come."""
        first = (self.replica, self._incarnation, self._column) == (1, 1, 0)
        if first and when == LEAVES and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def join(self) -> Meeting | None:
        """As said, once the others wait."""
        self._store.wait(["others wait"], timedelta(seconds=300))
        return super().join()

    def wait_for_return(self) -> None:
        """Until replica 1 asks to be taken in."""
        self._store.set("others wait", "")
        while self._store.add("joining/1.2", 0) < self._roster.num_ranks:
            time.sleep(0.05)

    def average(self, number: int, make: Any, average: Any) -> tuple[torch.Tensor, Meeting]:
        """As said."""
        done = super().average(number, make, average)
        self.kill("kept", number)
        return done

    def _has_mean(self, key: str, meeting: Meeting, tensor: torch.Tensor, average: Callable[..., None]) -> bool:
        self.kill("average", meeting.number)
        has_mean = super()._has_mean(key, meeting, tensor, average)
        self.kill("mean", meeting.number)
        return has_mean


class WeighingTrainer(Trainer):
    """Trainer of a rank that may be killed."""

    def step(self, tokens: Any, targets: Any) -> list[torch.Tensor]:
        """As said."""
        number, members = self._recorder.step, self._dims.members
        assert isinstance(members, LeavingMembership)
        if number == INNER_STEPS + 1:
            members.kill("step", 2)
        if number == 3 * INNER_STEPS and "TEST_RETURNS" in os.environ:
            members.wait_for_return()
        losses = super().step(tokens, targets)
        (stage,) = self.stages.values()
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in stage.parameters()]
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        torch.save(flat, Path(sys.argv[2]) / f"weights.rank{os.environ['RANK']}.step{number}.pt")
        return losses


if __name__ == "__main__":
    executor.worker.Trainer = WeighingTrainer  # type: ignore[attr-defined]
    executor.distributed.replicas.membership.Membership = LeavingMembership  # type: ignore[misc]
    executor.worker.main(sys.argv[1:])
