"""executor.worker, also writing the gradients of every step and torch's own record of step 2's collectives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import executor.worker
from executor.trainer import Trainer

PROFILED_STEP = 2  # DDP has settled its buckets by then


class DumpingTrainer(Trainer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps_done = 0
        self.optimizer.register_step_pre_hook(lambda *_: self.dump())

    def dump(self) -> None:
        gradients = {name: p.grad.clone() for name, p in self.stage.named_parameters() if p.grad is not None}
        torch.save(gradients, Path(sys.argv[2]) / f"gradients.rank{dist.get_rank()}.step{self.steps_done}.pt")

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        if self.steps_done == PROFILED_STEP:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
                losses = super().step(tokens, targets)
            torch.save(all_reduced_elements(trace), Path(sys.argv[2]) / f"collectives.rank{dist.get_rank()}.pt")
        else:
            losses = super().step(tokens, targets)
        self.steps_done += 1
        return losses


def all_reduced_elements(trace: profile) -> list[int]:
    """Elements of every all-reduce that torch was asked for, in order of time."""
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    calls = [event for event in results.events() if event.name() == "c10d::allreduce_"]
    calls.sort(key=lambda event: event.start_ns())
    return [torch.Size(call.structured_input_shapes()[0][0]).numel() for call in calls]


if __name__ == "__main__":
    executor.worker.Trainer = DumpingTrainer  # type: ignore[assignment, attr-defined]
    executor.worker.main(sys.argv[1:])
