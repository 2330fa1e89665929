"""executor.worker, also writing the weights after every step, those of all shards of the replica."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import executor.worker
from executor.train.trainer import Trainer


class WeighingTrainer(Trainer):
    def step(self, tokens: Any, targets: Any) -> list[torch.Tensor]:
        losses = super().step(tokens, targets)
        (stage,) = self.stages.values()
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in stage.parameters()]
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        torch.save(flat, Path(sys.argv[2]) / f"weights.rank{dist.get_rank()}.step{self._recorder.step}.pt")
        return losses


if __name__ == "__main__":
    executor.worker.Trainer = WeighingTrainer  # type: ignore[attr-defined]
    executor.worker.main(sys.argv[1:])
