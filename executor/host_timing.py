"""Times copies between the device and memory of its host over sizes, all ranks of the machine at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from executor.host_link import HostLink
from executor.timing import Stopwatch, sample_of, together
from simplan.cost.calibration import HostCopyTiming
from simplan.units import KIB, MIB

__all__ = ["time_host_copies"]

_SIZES_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)


def time_host_copies(num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]) -> list[HostCopyTiming]:
    """Times copies into buffers that are made for them, as the executor makes them.

    Args:
        num_ranks: Ranks of the machine.
        device: Where the tensors are.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    watch, link = Stopwatch(device), HostLink(device)
    tensors = [torch.zeros(num_bytes // 4, device=device) for num_bytes in _SIZES_BYTES]
    seconds: list[list[float]] = [[] for _ in tensors]
    done = -1  # the first round warms up
    while done < 0 or keep_going(done):
        for tensor, found in zip(tensors, seconds, strict=True):
            together()
            took_s = watch(partial(_copy, tensor, link))
            if done >= 0:
                found.append(took_s)
        done += 1
    return [
        HostCopyTiming(world_size=num_ranks, num_bytes=tensor.nbytes, seconds=sample_of(found))
        for tensor, found in zip(tensors, seconds, strict=True)
    ]


def _copy(tensor: torch.Tensor, link: HostLink) -> None:
    link.wait(link.send(tensor, link.host_buffer(tensor)))
