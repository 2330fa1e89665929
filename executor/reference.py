"""How fast the machine is right now: the time of one matrix product that never changes.

Clouds share their cores and GPUs lower their clocks, so a calibration may describe a machine that was faster or slower
than it is during the run. The same product, timed in both, tells by how much.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from executor.timing import Stopwatch, gathered, together

__all__ = ["Reference"]

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
