"""Times the kernels of the grid, all ranks at once, each until its interval is narrow or the time is up."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from executor.fsdp_timing import FsdpBench
from executor.kernel_probes import Probe, fsdp_benches, grid_sizes, probes
from executor.timing import TIMED_DTYPES, Stopwatch, of_rank_0, sample_of, together, wide
from simplan.cost.calibration import KernelName, KernelTiming, Sample, TimedDtype

__all__ = ["time_kernels"]

_SHORTEST_S = 3e-4
_MOST_REPEATS = 16


def time_kernels(
    dtype: TimedDtype, num_ranks: int, device: torch.device, keep_going: Callable[[int], bool], *, small: bool = False
) -> list[KernelTiming]:
    """Times every kernel at every size.

    Args:
        dtype: Precision; of the linear layers that are in 8 bits nothing is timed here.
        num_ranks: Ranks that do this at the same time.
        device: Where.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
        small: Fewer and smaller sizes.
    """
    watch, sizes = Stopwatch(device), grid_sizes(device, small=small)
    found = list(probes(TIMED_DTYPES[dtype], device, sizes))
    for probe in found:
        _round(probe, watch, 0)
        once_s = of_rank_0(_round(probe, watch, 1))
        probe.repeats = min(_MOST_REPEATS, max(1, math.ceil(_SHORTEST_S / once_s)))
        probe.forward_s.clear()
        probe.backward_s.clear()
    benches: list[tuple[tuple[int, ...], FsdpBench, tuple[list[float], list[float]]]] = []
    benches += ((numbers, bench, ([], [])) for numbers, bench in fsdp_benches(TIMED_DTYPES[dtype], device, sizes))
    for _, bench, _ in benches:
        bench.round()
    done, still_open = 0, found
    while still_open and keep_going(done):
        for probe in still_open:
            together()
            _round(probe, watch, done)
        for _, bench, seconds in benches:
            together()
            for part, took_s in zip(seconds, bench.round(), strict=True):
                part.append(took_s)
        done += 1
        are_wide = of_rank_0([wide(probe.forward_s) or wide(probe.backward_s) for probe in still_open])
        still_open = [probe for probe, is_wide in zip(still_open, are_wide, strict=True) if is_wide]

    def timing(kernel: KernelName, shape: tuple[int, ...], seconds: Sample, backward: Sample | None) -> KernelTiming:
        return KernelTiming(
            kernel=kernel, sizes=shape, dtype=dtype, num_ranks=num_ranks, seconds=seconds, backward_s=backward
        )

    timings = [
        timing(p.kernel, p.sizes, sample_of(p.forward_s), sample_of(p.backward_s) if p.inputs else None) for p in found
    ]
    for shape, _, (gather_s, reduce_s) in benches:
        timings.append(timing("gather_copy", shape, sample_of(gather_s), None))
        timings.append(timing("reduce_copy", shape, sample_of(reduce_s), None))
    return timings


def _round(probe: Probe, watch: Stopwatch, number: int) -> float:
    """Times a probe once; gives the time of its forward."""
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        for n in range(probe.repeats):
            output = probe.forward(number * probe.repeats + n)
            if probe.inputs:
                assert isinstance(output, torch.Tensor)
                outputs.append(output)

    probe.forward_s.append(watch(forward) / probe.repeats)
    if probe.inputs:
        gradient = torch.ones_like(outputs[0])

        def backward() -> None:
            while outputs:
                torch.autograd.grad(outputs.pop(), probe.inputs, gradient)

        probe.backward_s.append(watch(backward) / probe.repeats)
    return probe.forward_s[-1]
