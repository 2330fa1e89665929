"""Losses of a run whose nodes may go: with a node go the losses of its ranks, so rank 0 keeps everybody's in time."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch.distributed as dist

__all__ = ["LossLog", "read_losses"]

_FILE = "losses.jsonl"


class LossLog:
    """Gathers losses before each checkpoint, so that all are known of the steps that are not done again.

    Every rank must make one and call the same methods.

    Args:
        folder: Of checkpoints, which all nodes share: rank 0 may be on another one later. Gets a JSON line ``{step,
            loss}`` for every step, with the mean over ranks and microbatches.
        every: Steps between checkpoints.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._file, self._every = folder / _FILE, every
        self._group = dist.new_group(backend="gloo")
        self._mine: dict[int, list[float]] = {}

    def add(self, step: int, losses: list[float]) -> None:
        """Of a step that is done (counted from 0): this rank's losses, none on ranks without the last stage."""
        self._mine[step] = losses
        if (step + 1) % self._every == 0:
            self.gather()

    def gather(self) -> None:
        """Writes down those that are not yet."""
        if not self._mine:
            return
        leads = dist.get_rank() == 0
        everybody: list[dict[int, list[float]]] | None = [{}] * dist.get_world_size() if leads else None
        dist.gather_object(self._mine, everybody, dst=0, group=self._group)
        if everybody is not None:
            means = {k: statistics.fmean(loss for theirs in everybody for loss in theirs[k]) for k in self._mine}
            with self._file.open("a") as stream:
                stream.writelines(json.dumps({"step": k, "loss": mean}) + "\n" for k, mean in means.items())
        self._mine.clear()


def read_losses(folder: Path) -> dict[int, float]:
    """Of every step that a folder of checkpoints knows of; half a line, whose writer was killed, is not."""
    file = folder / _FILE
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {entry["step"]: entry["loss"] for entry in map(json.loads, (x for x in lines if x.endswith("\n")))}
