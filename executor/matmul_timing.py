"""Times matrix products over shapes, all ranks at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from executor.timing import TIMED_DTYPES, Stopwatch, sample_of, together
from simplan.cost.calibration import MatmulTiming, TimedDtype

__all__ = ["time_matmuls"]

_SHAPES = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (512, 2048, 512), (512, 512, 2048))


def time_matmuls(
    dtype: TimedDtype, num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]
) -> list[MatmulTiming]:
    """Times (m x k) by (k x n) for a few shapes (m, n, k).

    Args:
        dtype: Precision.
        num_ranks: Ranks that do this at the same time.
        device: Where.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    torch_dtype = TIMED_DTYPES[dtype]
    watch = Stopwatch(device)
    operands = {
        (m, n, k): (
            torch.randn(m, k, device=device, dtype=torch_dtype),
            torch.randn(k, n, device=device, dtype=torch_dtype),
        )
        for m, n, k in _SHAPES
    }
    seconds: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in _SHAPES}
    for a, b in operands.values():
        watch(torch.matmul, a, b)  # warm-up
    done = 0
    while keep_going(done):
        for shape, (a, b) in operands.items():
            together()
            seconds[shape].append(watch(torch.matmul, a, b))
        done += 1
    return [
        MatmulTiming(m=m, n=n, k=k, dtype=dtype, num_ranks=num_ranks, seconds=sample_of(timings))
        for (m, n, k), timings in seconds.items()
    ]
