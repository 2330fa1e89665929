"""Times of single kernels, interpolated between the sizes of a calibration's grid.

Between sizes, logarithms are linear: a power law is met exactly. Below the smallest size a kernel takes what that takes
(it is bound by its launch), beyond the largest it takes as many times longer as it has more to do, and so where a grid
has no time at a corner because that would have taken too long.
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

_REACH = 4.0  # so many times beyond its sizes a grid is still believed: the distance of two of them
_OF_ATTENTION = (1, 2, 1)  # its time goes with heads, the square of their length, and their width


class GridTime(NamedTuple):
    """A time.

    Attributes:
        seconds: How long.
        inside: It lies within what was timed.
        std: Relative standard deviation of the timings that it comes from.
    """

    seconds: float
    inside: bool
    std: float = 0.0


class KernelGrid:
    """The grid of one precision.

    Args:
        timings: Kernels over sizes, all in that precision and of as many ranks.
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
        """Whether a kernel was timed."""
        return (kernel, False) in self._tables

    def time(self, kernel: KernelName, sizes: Sequence[float], *, backward: bool = False) -> GridTime:
        """Time of a kernel that was timed, at sizes that need not have been.

        Args:
            kernel: Which.
            sizes: As of ``KernelTiming``; fractions count.
            backward: Of its backward.
        """
        return self._tables[kernel, backward].at(sizes)


class _Table:
    """Times of one kernel, over a lattice some corners of which may be missing."""

    def __init__(self, times: Mapping[tuple[int, ...], tuple[float, float]], powers: Sequence[int]) -> None:
        self._times = {sizes: seconds for sizes, (seconds, _) in times.items()}
        self._std = math.fsum(std for _, std in times.values()) / len(times)
        self._powers = powers
        self._axes = [sorted({sizes[axis] for sizes in times}) for axis in range(len(powers))]
        self._most = max(self._work(sizes) for sizes in times)

    def _work(self, sizes: Sequence[float]) -> float:
        return math.prod(size**power for size, power in zip(sizes, self._powers, strict=True))

    def at(self, sizes: Sequence[float]) -> GridTime:
        """Interpolated along every axis."""
        inside = self._work(sizes) <= _REACH * self._most
        ends: list[tuple[tuple[int, float], ...]] = []  # by axis, the neighbours and their weights
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
        """A time of the lattice; where it is missing that of the nearest smaller corner, for more work."""
        if sizes in self._times:
            return self._times[sizes]
        smaller = [known for known in self._times if all(k <= s for k, s in zip(known, sizes, strict=True))]
        nearest = max(smaller or self._times, key=self._work)
        return self._times[nearest] * max(1.0, self._work(sizes) / self._work(nearest))


def _neighbours(size: float, axis: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """The sizes around one and their weights, linear in the logarithm."""
    if size <= axis[0] or len(axis) == 1:
        return ((axis[0], 1.0),)
    if size >= axis[-1]:
        return ((axis[-1], 1.0),)
    upper = bisect_left(axis, size)
    low, high = axis[upper - 1], axis[upper]
    share = math.log(size / low) / math.log(high / low)
    return ((low, 1 - share), (high, share))
