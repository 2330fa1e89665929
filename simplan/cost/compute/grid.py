"""Times of single kernels, interpolated between the sizes of a calibration's grid.

Interpolation between sizes is linear in logarithms, so a power law is met exactly. Below the smallest size a kernel
takes the time of that size (launch-bound). Beyond the largest size, time grows in proportion to the work. The same
applies to a corner of the grid without a timing, because that would have taken too long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from simplan.cost.calibration.format import KernelName, KernelTiming

__all__ = ["GridTime", "KernelGrid"]

_REACH = 4.0  # factor beyond its sizes within which a grid is trusted: the distance of two sizes
_OF_ATTENTION = (1, 2, 1)  # time scales with heads, the square of their length, and head_dim


class GridTime(NamedTuple):
    """Time of a kernel from the grid.

    Attributes:
        seconds: Time in seconds.
        inside: True if the size is within the timed range.
        std: Relative standard deviation of the underlying timings.
    """

    seconds: float
    inside: bool
    std: float = 0.0


class KernelGrid:
    """The grid of one precision.

    Args:
        timings: Kernel timings over sizes, all in that precision and with the same number of ranks.
    """

    def __init__(self, timings: Iterable[KernelTiming]) -> None:
        tables: dict[tuple[KernelName, bool], dict[tuple[int, ...], tuple[float, float]]] = defaultdict(dict)
        for timing in timings:
            tables[timing.kernel, False][timing.sizes] = timing.seconds.mean_s, timing.seconds.round_std
            if timing.backward_s is not None:
                tables[timing.kernel, True][timing.sizes] = timing.backward_s.mean_s, timing.backward_s.round_std
        self._tables = {
            key: _Table(times, _OF_ATTENTION if key[0] == "attention" else (1,) * len(next(iter(times))))
            for key, times in tables.items()
        }

    def __contains__(self, kernel: object) -> bool:
        """Returns True if the kernel was timed."""
        return (kernel, False) in self._tables

    def time(self, kernel: KernelName, sizes: Sequence[float], *, backward: bool = False) -> GridTime:
        """Returns the time of a timed kernel at any size.

        Args:
            kernel: Name of the kernel.
            sizes: See ``KernelTiming``; fractions are allowed.
            backward: True for the kernel's backward.
        """
        return self._tables[kernel, backward].at(sizes)


class _Table:
    """Times of one kernel over a lattice of sizes, of which some corners may be missing."""

    def __init__(self, times: Mapping[tuple[int, ...], tuple[float, float]], powers: Sequence[int]) -> None:
        self._times = {sizes: seconds for sizes, (seconds, _) in times.items()}
        self._std = math.fsum(std for _, std in times.values()) / len(times)
        self._powers = powers
        self._axes = [sorted({sizes[axis] for sizes in times}) for axis in range(len(powers))]
        self._most = max(self._work(sizes) for sizes in times)

    def _work(self, sizes: Sequence[float]) -> float:
        return math.prod(size**power for size, power in zip(sizes, self._powers, strict=True))

    def at(self, sizes: Sequence[float]) -> GridTime:
        """Returns the time interpolated along every axis."""
        inside = self._work(sizes) <= _REACH * self._most
        ends: list[tuple[tuple[int, float], ...]] = []  # by axis, the neighbors and their weights
        beyond = 1.0
        for size, axis, power in zip(sizes, self._axes, self._powers, strict=True):
            inside = inside and size <= _REACH * axis[-1]
            beyond *= max(1.0, size / axis[-1]) ** power
            ends.append(_neighbours(size, axis))
        log_s = 0.0
        for corner in product(*ends):
            weight = math.prod(weight for _, weight in corner)
            if weight:
                log_s += weight * math.log(self._corner(tuple(size for size, _ in corner)))
        return GridTime(math.exp(log_s) * beyond, inside, self._std)

    def _corner(self, sizes: tuple[int, ...]) -> float:
        """Returns the time of a lattice corner; a missing corner is scaled by work from the nearest smaller one."""
        if sizes in self._times:
            return self._times[sizes]
        smaller = [known for known in self._times if all(k <= s for k, s in zip(known, sizes, strict=True))]
        nearest = max(smaller or self._times, key=self._work)
        return self._times[nearest] * max(1.0, self._work(sizes) / self._work(nearest))


def _neighbours(size: float, axis: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Returns the sizes next to a size and their weights, linear in the logarithm."""
    if size <= axis[0] or len(axis) == 1:
        return ((axis[0], 1.0),)
    if size >= axis[-1]:
        return ((axis[-1], 1.0),)
    upper = bisect_left(axis, size)
    low, high = axis[upper - 1], axis[upper]
    share = math.log(size / low) / math.log(high / low)
    return ((low, 1 - share), (high, share))
