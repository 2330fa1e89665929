"""Peak memory of this process, by the device's own accounts and by the profiler's trace of allocations."""

from __future__ import annotations

import os
import resource
import sys
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from simplan.program.measurement import PeakMemory

__all__ = ["context_bytes", "forget_peaks", "peak_allocated_bytes", "peak_memory", "process_bytes"]


def peak_memory(device: torch.device) -> PeakMemory:
    """What the device's accounts say about this process so far.

    CUDA: the caching allocator's peaks, and what the driver counts as used by this process now, or, where NVML cannot
    be asked or does not know the process (as in a container), by all of them. CPU: the peak resident set; allocated
    bytes need a trace (``peak_allocated_bytes``).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return PeakMemory(
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            device_bytes=_of_this_process(device) or total - free,
        )
    return PeakMemory(device_bytes=_peak_resident_bytes())


def _of_this_process(device: torch.device) -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def forget_peaks(device: torch.device) -> None:
    """Counts peaks from here on: what making and splitting the weights took is not of the training."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def context_bytes(device: torch.device) -> int:
    """What this process takes on its device before it trains anything of size: to be asked first.

    One step of a tiny network makes torch load what any training needs.
    """
    layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    heads = layers(torch.ones(4, 16, device=device)).view(1, 1, 4, 16)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).view(4, 16)
    nn.functional.cross_entropy(attended, torch.zeros(4, dtype=torch.long, device=device)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return peak_memory(device).device_bytes or 0


def process_bytes(what: str) -> int | None:
    """What Linux counts of this process: ``VmHWM`` (peak resident), ``VmRSS``, ``VmSize``; None elsewhere."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) * 1024


def _peak_resident_bytes() -> int:
    peak = process_bytes("VmHWM")  # unlike getrusage, not raised by the process we were forked from
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_allocated_bytes(run: Callable[[], None]) -> int:
    """Most bytes that tensors made by ``run`` held at once on the CPU, by torch's trace of allocations.

    ``run`` starts from nothing: tensors made before it are not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    held = _Held()
    return max((held.change(address, num_bytes) for address, num_bytes in _memory_events(trace)), default=0)


class _Held:
    """What is allocated, by address.

    Releases by threads of torch's own (gloo's hold what they send) are missing in the trace. They show when the memory
    is given out again.
    """

    def __init__(self) -> None:
        self._total = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def change(self, address: int, num_bytes: int) -> int:
        """An allocation, or, negative, a release; gives the bytes that are held after it."""
        if num_bytes < 0:
            if address in self._sizes:
                self._forget(bisect_left(self._starts, address))
            return self._total
        place = bisect_left(self._starts, address)
        if place and self._starts[place - 1] + self._sizes[self._starts[place - 1]] > address:
            place -= 1
        while place < len(self._starts) and self._starts[place] < address + num_bytes:
            self._forget(place)
        self._starts.insert(place, address)
        self._sizes[address] = num_bytes
        self._total += num_bytes
        return self._total

    def _forget(self, place: int) -> None:
        self._total -= self._sizes.pop(self._starts.pop(place))


def _memory_events(trace: profile) -> list[tuple[int, int]]:
    """Address and bytes of every allocation (positive) and release (negative), in order of time."""
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    pending, found = list(results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields))
    found.sort(key=lambda timed: timed[0])
    return [(fields.ptr, fields.alloc_size) for _, fields in found]
