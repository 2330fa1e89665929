"""Repeated timings, gathered over ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from simplan.cost.calibration import Sample

__all__ = ["Stopwatch", "sample_of", "together"]


class Stopwatch:
    """Times calls on a device; on CUDA a call ends when its kernels have."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __call__(self, run: Callable[..., object], *args: object, **kwargs: object) -> float:
        """Seconds that ``run(*args, **kwargs)`` takes."""
        if self._cuda:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        run(*args, **kwargs)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start_s


def together() -> None:
    """Waits for all ranks, so that what follows runs on all of them at once."""
    if dist.get_world_size() > 1:
        dist.barrier()


def sample_of(seconds: Sequence[float]) -> Sample:
    """Winsorized mean and 10th and 90th percentile of the timings of all ranks; every rank must call this."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(seconds))
    ordered = sorted(value for values in gathered for value in values)

    def quantile(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    low_s, high_s = quantile(0.05), quantile(0.95)
    mean_s = statistics.fmean(min(max(value, low_s), high_s) for value in ordered)
    return Sample(mean_s=mean_s, low_s=quantile(0.1), high_s=quantile(0.9), num_repeats=len(ordered))
