"""Repeated timings on all ranks simultaneously, and their statistics."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from simplan.cost.calibration.format import Sample, TimedDtype

_Value = TypeVar("_Value")

TIMED_DTYPES: dict[TimedDtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of everything except the linear layers of blocks
}
_MIN_TIMINGS = 8
_AHEAD_S = 0.01  # for the host to issue a few layers
_CYCLES_PER_S = 2e9  # of a device's clock, about
_MAX_HALF_WIDTH = 0.015  # of the median
_P10_TO_P90 = 2.563  # of a normal distribution, in standard deviations

KeepGoing = Callable[[int], bool]
"""Takes the number of finished rounds; True for another round. All ranks get the same answer."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Ranks, device and stopping rule of a measurement.

    Attributes:
        num_ranks: Ranks per node, which all take part at the same time.
        keep_going: Called before each round.
    """

    num_ranks: int
    device: torch.device
    keep_going: KeepGoing


class Stopwatch:
    """Times calls on a device; on CUDA a call ends when its kernels have ended."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __call__(self, run: Callable[..., object], *args: object, **kwargs: object) -> float:
        """Seconds of ``run(*args, **kwargs)``."""
        if self._cuda:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        run(*args, **kwargs)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    def each(self, calls: Iterable[Callable[[], object]], ahead_s: float = _AHEAD_S) -> list[float]:
        """Seconds of each of several calls in a row; on CUDA without their launch overhead.

        The device gets other work first, so that the host is ahead of the device, as inside a step.

        Args:
            calls: What is timed.
            ahead_s: Seconds of other work on CUDA, in which the host issues the calls.
        """
        if not self._cuda:
            return [self(call) for call in calls]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(ahead_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        events = [torch.cuda.Event(enable_timing=True)]  # type: ignore[no-untyped-call]
        events[0].record()
        for call in calls:
            call()
            events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[-1].record()
        torch.cuda.synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]

    def overlapped(
        self, begin: Callable[[], object], run: Callable[[], object], wait: Callable[[], object]
    ) -> tuple[float, float]:
        """Seconds until ``run`` has ended, and until everything has.

        Args:
            begin: Starts asynchronous work, on CUDA on another stream.
            run: Overlaps with that work.
            wait: Waits for that work.
        """
        if not self._cuda:
            start_s = time.perf_counter()
            begin()
            run()
            ran_s = time.perf_counter() - start_s
            wait()
            return ran_s, time.perf_counter() - start_s
        torch.cuda.synchronize()
        # events, because a synchronization before the matmuls would wait for the collectives
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
    """Waits for all ranks, so that they start the next timing simultaneously."""
    if dist.get_world_size() > 1:
        dist.barrier()


def gathered(value: _Value) -> list[_Value]:
    """The values of all ranks; every rank must call this."""
    values: list[_Value] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def of_rank_0(value: _Value) -> _Value:
    """The value of rank 0; every rank must call this."""
    values = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def wide(seconds: Sequence[float]) -> bool:
    """True while the 95 % interval of the median, from quartiles, is wider than 1.5 % either way.

    The half-width is 1.57 (q3 - q1) / sqrt(n) (McGill, Tukey and Larsen 1978). Nothing timed is not wide.
    """
    if not seconds:
        return False
    if len(seconds) < _MIN_TIMINGS:
        return True
    low_s, median_s, high_s = np.quantile(seconds, (0.25, 0.5, 0.75))
    return bool(1.57 * (high_s - low_s) / math.sqrt(len(seconds)) > _MAX_HALF_WIDTH * median_s)


def sample_of(seconds: Sequence[float], per_round: int = 1) -> Sample:
    """Statistics over the timings of all ranks; every rank must call this.

    Args:
        seconds: This rank's timings in order.
        per_round: Timings of one round.
    """
    of_ranks = gathered(list(seconds))
    values_s = np.concatenate(of_ranks)
    rounds_s = [np.mean(of_rank[i : i + per_round]) for of_rank in of_ranks for i in range(0, len(of_rank), per_round)]
    mean_s = float(values_s.clip(*np.quantile(values_s, (0.05, 0.95))).mean())
    low_s, high_s = np.quantile(values_s, (0.1, 0.9))
    low_round_s, high_round_s = np.quantile(rounds_s, (0.1, 0.9))
    return Sample(
        mean_s=mean_s,
        low_s=float(low_s),
        high_s=float(high_s),
        round_std=float(high_round_s - low_round_s) / _P10_TO_P90 / mean_s,
        num_repeats=len(values_s),
    )


_MATMULS = {"cpu": (384, torch.float32), "cuda": (4096, torch.bfloat16)}
_MIN_REFERENCE_S = 0.02
_MAX_MATMULS = 200


class ReferenceMatmul:
    """The reference matmul on all ranks simultaneously: a measure of the machine's current speed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._watch = Stopwatch(device)
        self._seconds: list[float] = []
        # on CUDA they stay, so that they take the same memory at every peak; Linux gets them back from a CPU
        self._matrices = self._make_matrices() if device.type == "cuda" else None

    @property
    def held_bytes(self) -> int:
        """Bytes of the device between two calls of ``time_once``."""
        return sum(matrix.nbytes for matrix in self._matrices or ())

    def _make_matrices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size, dtype = _MATMULS[self.device.type]
        first = torch.full((size, size), 0.5, dtype=dtype, device=self.device)
        return first, torch.full_like(first, 0.5), torch.empty_like(first)

    def time_once(self) -> float:
        """Mean seconds of a matmul over at least a fiftieth of a second; every rank must call this.

        On the CPU the matrices are freed before this returns; on CUDA they are ``held_bytes`` of every peak.
        """
        first, second, result = self._matrices or self._make_matrices()
        torch.mm(first, second, out=result)
        together()
        spent_s, count = 0.0, 0
        while spent_s < _MIN_REFERENCE_S and count < _MAX_MATMULS:
            spent_s += self._watch(torch.mm, first, second, out=result)
            count += 1
        self._seconds.append(spent_s / count)
        return self._seconds[-1]

    def before_rounds(self, keep_going: KeepGoing) -> KeepGoing:
        """Times the matmul before every round that ``keep_going`` allows."""
        return lambda done: keep_going(done) and self.time_once() > 0.0

    def median_s(self) -> float | None:
        """Median over all timings of all ranks, None without any; every rank must call this.

        Not the mean: one stall of the machine in so short a time would count like a slow machine.
        """
        seconds = [value for of_rank in gathered(self._seconds) for value in of_rank]
        return statistics.median(seconds) if seconds else None
