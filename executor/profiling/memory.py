"""Peak memory of this process, by the device's statistics and by the profiler's trace of allocations."""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from simplan.runs.measurement import PeakMemory

_FORGET = "simplan: forget the peak"


def peak_memory(device: torch.device) -> PeakMemory:
    """Peak memory of this process so far, by the device's statistics.

    CUDA: the caching allocator's peaks, and the current memory of this process according to the driver. Without NVML,
    or if NVML does not know the process (as in a container), the memory is that of all processes. CPU: the peak
    resident set; allocated bytes need a trace (``peak_allocated_bytes``).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return PeakMemory(
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            device_bytes=_of_this_process(device) or total - free,
        )
    return PeakMemory(device_bytes=process_bytes("VmHWM"))


def without_bytes(memory: PeakMemory, num_bytes: int) -> PeakMemory:
    """Peaks without bytes that the measurement itself held all the time."""
    if not num_bytes:
        return memory
    counted = {name: value - num_bytes for name, value in memory.model_dump().items() if value is not None}
    return memory.model_copy(update=counted)


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
    """Resets the peaks, so that building and sharding the weights does not count as training.

    CPU: glibc gives free memory back, and Linux resets the peak resident set (proc(5), ``clear_refs``), where it can.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def context_bytes(device: torch.device) -> int:
    """Memory of this process on its device before it trains a model of any size; to be called first.

    One step of a tiny network makes torch load the libraries that any training needs.
    """
    layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    heads = layers(torch.ones(4, 16, device=device)).view(1, 1, 4, 16)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).view(4, 16)
    nn.functional.cross_entropy(attended, torch.zeros(4, dtype=torch.long, device=device)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return peak_memory(device).device_bytes or 0


def process_bytes(name: str) -> int:
    """Memory of this process by Linux: ``VmHWM`` (peak resident set), ``VmRSS`` or ``VmSize``.

    Unlike that of getrusage, the peak does not include the process from which this one was forked.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def peak_allocated_bytes(run: Callable[[], None]) -> int:
    """Peak of the bytes of all tensors that ``run`` makes on the CPU, by torch's trace of allocations.

    ``forget_traced_peak`` begins the peak again.
    """
    with AllocationTrace() as trace:
        run()
    return trace.peak_bytes()


def forget_traced_peak() -> None:
    """Begins the peak of a trace again, as ``forget_peaks``: bytes that were released before do not count."""
    with record_function(_FORGET):
        pass


class AllocationTrace:
    """Trace of the tensors that this process makes on the CPU while the context is open."""

    def __enter__(self) -> Self:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.stop()

    def peak_bytes(self) -> int:
        """Peak of their bytes, once the context is closed; tensors of before do not count."""
        allocated, peak = _Allocated(), 0
        for change in _memory_events(self._profile):
            peak = allocated.total if change is None else max(peak, allocated.change(*change))
        return peak


class _Allocated:
    """Allocations by address.

    The trace lacks releases by other threads of torch, such as gloo's, which keep the tensors they send. A missing
    release becomes visible when the memory is allocated again.
    """

    def __init__(self) -> None:
        self.total = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def change(self, address: int, num_bytes: int) -> int:
        """Counts an allocation, or a release if negative; returns the bytes allocated after it."""
        if num_bytes < 0:
            if address in self._sizes:
                self._forget(bisect_left(self._starts, address))
            return self.total
        index = bisect_left(self._starts, address)
        if index and self._starts[index - 1] + self._sizes[self._starts[index - 1]] > address:
            index -= 1
        while index < len(self._starts) and self._starts[index] < address + num_bytes:
            self._forget(index)
        self._starts.insert(index, address)
        self._sizes[address] = num_bytes
        self.total += num_bytes
        return self.total

    def _forget(self, index: int) -> None:
        self.total -= self._sizes.pop(self._starts.pop(index))


def _memory_events(trace: profile) -> list[tuple[int, int] | None]:
    """Address and bytes of every allocation (positive) and release (negative), in order of time.

    None where ``forget_traced_peak`` was called.
    """
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    pending, events = list(results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name in ("[memory]", _FORGET):
            events.append(event)
    events.sort(key=lambda event: event.start_time_ns)
    return [
        None if event.name == _FORGET else (event.extra_fields.ptr, event.extra_fields.alloc_size) for event in events
    ]
