"""Repeated timings, gathered over ranks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist

from simplan.cost.calibration import Sample, TimedDtype

__all__ = ["TIMED_DTYPES", "Reference", "Stopwatch", "gathered", "of_rank_0", "sample_of", "together", "wide"]

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
_AHEAD_CYCLES = 20_000_000  # of the device's clock: some 10 ms
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

    def each(self, calls: Iterable[Callable[[], object]]) -> list[float]:
        """Seconds of each of several calls in a row; on CUDA launching them does not count.

        The device is kept busy first, so that the host is ahead of it, as it is inside of a step.
        """
        if not self._cuda:
            return [self(call) for call in calls]
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        events = [torch.cuda.Event(enable_timing=True)]  # type: ignore[no-untyped-call]
        events[0].record()
        for call in calls:
            call()
            events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[-1].record()
        torch.cuda.synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]

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


_SIZES = {"cpu": (384, torch.float32), "cuda": (4096, torch.bfloat16)}
_LEAST_S = 0.02
_MOST_PRODUCTS = 200


class Reference:
    """The product, on all ranks at once.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = Stopwatch(device)
        self._seconds: list[float] = []

    def time_once(self) -> float:
        """Mean seconds of a product over at least a fiftieth of a second; every rank must call this.

        Its matrices are given back before this returns, so they do not count in what a step needs.
        """
        size, dtype = _SIZES[self._device.type]
        first = torch.full((size, size), 0.5, dtype=dtype, device=self._device)
        second, product = torch.full_like(first, 0.5), torch.empty_like(first)
        torch.mm(first, second, out=product)
        together()
        spent_s, count = 0.0, 0
        while spent_s < _LEAST_S and count < _MOST_PRODUCTS:
            spent_s += self._watch(torch.mm, first, second, out=product)
            count += 1
        self._seconds.append(spent_s / count)
        return self._seconds[-1]

    def beside(self, keep_going: Callable[[int], bool]) -> Callable[[int], bool]:
        """Times the product before every round that ``keep_going`` allows."""

        def timed(done: int) -> bool:
            going = keep_going(done)
            if going:
                self.time_once()
            return going

        return timed

    def median_s(self) -> float | None:
        """Of all that was timed on all ranks, None for nothing; every rank must call this.

        Not the mean: one stall of the machine in so short a time would count as if it were slow throughout.
        """
        found = [seconds for of_rank in gathered(self._seconds) for seconds in of_rank]
        return statistics.median(found) if found else None
