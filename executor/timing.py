"""Repeated timings, gathered over ranks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from simplan.cost.calibration import Sample, TimedDtype

__all__ = ["TIMED_DTYPES", "Stopwatch", "gathered", "of_rank_0", "sample_of", "together", "wide"]

_Value = TypeVar("_Value")

TIMED_DTYPES: dict[TimedDtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # all but the linear layers of blocks
}
_FEWEST = 8
_NARROW = 0.015  # of the median
_P10_TO_P90 = 2.563  # of a normal distribution, in standard deviations


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

    def beside(
        self, begin: Callable[[], object], run: Callable[[], object], wait: Callable[[], object]
    ) -> tuple[float, float]:
        """Seconds until ``run`` is done, and until all is, begun together.

        Args:
            begin: Starts something that goes on by itself, on CUDA on another stream.
            run: What runs beside it.
            wait: Waits for what was begun.
        """
        if not self._cuda:
            start_s = time.perf_counter()
            begin()
            run()
            ran_s = time.perf_counter() - start_s
            wait()
            return ran_s, time.perf_counter() - start_s
        torch.cuda.synchronize()
        # events, for a synchronization before the products would wait for the collectives
        start, ran, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        start.record()
        begin()
        run()
        ran.record()
        wait()
        ended.record()
        torch.cuda.synchronize()
        return start.elapsed_time(ran) / 1e3, start.elapsed_time(ended) / 1e3


def together() -> None:
    """Waits for all ranks, so that what follows runs on all of them at once."""
    if dist.get_world_size() > 1:
        dist.barrier()


def gathered(value: _Value) -> list[_Value]:
    """The values of all ranks; every rank must call this."""
    found: list[_Value] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_rank_0(value: _Value) -> _Value:
    """What rank 0 says, so that all ranks do the same."""
    told = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0]


def wide(seconds: Sequence[float]) -> bool:
    """Whether the median is not known well yet: its 95 % interval, from quartiles, is wider than 1.5 % either way.

    The half-width is 1.57 (q3 - q1) / sqrt(n) (McGill, Tukey and Larsen 1978). Nothing timed is known well.
    """
    if not seconds:
        return False
    if len(seconds) < _FEWEST:
        return True
    ordered = sorted(seconds)
    quartiles_s = _quantile(ordered, 0.75) - _quantile(ordered, 0.25)
    return 1.57 * quartiles_s / math.sqrt(len(ordered)) > _NARROW * _quantile(ordered, 0.5)


def sample_of(seconds: Sequence[float], per_round: int = 1) -> Sample:
    """What the timings of all ranks come to; every rank must call this.

    Args:
        seconds: This rank's timings in order.
        per_round: How many of them belong to one round.
    """
    of_ranks = gathered(list(seconds))
    ordered = sorted(value for values in of_ranks for value in values)
    low_s, high_s = _quantile(ordered, 0.05), _quantile(ordered, 0.95)
    rounds = sorted(
        statistics.fmean(values[first : first + per_round])
        for values in of_ranks
        for first in range(0, len(values), per_round)
    )
    mean_s = statistics.fmean(min(max(value, low_s), high_s) for value in ordered)
    return Sample(
        mean_s=mean_s,
        low_s=_quantile(ordered, 0.1),
        high_s=_quantile(ordered, 0.9),
        round_std=(_quantile(rounds, 0.9) - _quantile(rounds, 0.1)) / _P10_TO_P90 / mean_s,
        num_repeats=len(ordered),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the neighbours, as numpy's."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
