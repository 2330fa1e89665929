"""Peak memory against counts by hand."""

from __future__ import annotations

import gc
from threading import Thread

import torch

from executor.profiling.memory import forget_peaks, forget_traced_peak, peak_allocated_bytes, peak_memory


def test_peak_of_known_allocations() -> None:
    """4 kB + 8 kB; the 4 kB go; 2 kB and then 6 kB come: the peak is 8 + 2 + 6 kB."""

    def run() -> None:
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(2000, dtype=torch.float32)
        del first
        third = torch.empty(500, dtype=torch.float32)
        fourth = torch.empty(1500, dtype=torch.float32)
        del second, third, fourth

    gc.collect()
    assert peak_allocated_bytes(run) == 4 * (2000 + 500 + 1500)


def test_a_peak_that_is_forgotten_leaves_what_is_still_there() -> None:
    """8 kB and 4 kB, of which the 4 kB stay; then 2 kB come."""

    def run() -> None:
        first = torch.empty(2000, dtype=torch.float32)
        second = torch.empty(1000, dtype=torch.float32)
        del first
        forget_traced_peak()
        third = torch.empty(500, dtype=torch.float32)
        del second, third

    gc.collect()
    assert peak_allocated_bytes(run) == 4 * (1000 + 500)


def test_memory_released_by_other_threads_is_not_counted_forever() -> None:
    """The trace misses such releases; they show when the memory is given out again."""
    num_bytes = 2**26

    def run() -> None:
        for _ in range(10):
            held = [torch.empty(num_bytes, dtype=torch.uint8)]
            releasing = Thread(target=held.clear)
            releasing.start()
            releasing.join()

    gc.collect()
    assert num_bytes <= peak_allocated_bytes(run) <= 2 * num_bytes


def test_resident_set_holds_what_was_touched() -> None:
    block = torch.ones(2**29, dtype=torch.uint8)
    after = peak_memory(torch.device("cpu")).device_bytes
    assert after is not None
    assert after >= block.nbytes
    del block
    forget_peaks(torch.device("cpu"))
    left = peak_memory(torch.device("cpu")).device_bytes
    assert left is not None
    assert left <= after - 2**28, "weights that are built before training are no part of its peak"
