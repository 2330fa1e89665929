"""Times collectives and messages over sizes, all ranks of the machine taking part at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from executor.timing import Stopwatch, sample_of, together
from simplan.cost.calibration import CommunicationTiming
from simplan.units import KIB, MIB

__all__ = ["group_sizes", "time_links"]

_SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
_MESSAGES_PER_TIMING = 4


def group_sizes(num_ranks: int) -> list[int]:
    """Sizes of groups that divide the ranks evenly, smallest first."""
    return [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]


def time_links(num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]) -> list[CommunicationTiming]:
    """Times all-reduces in groups of every even division, and sends between neighbours.

    Args:
        num_ranks: Ranks of the machine.
        device: Where the buffers are.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    rank = dist.get_rank()
    watch = Stopwatch(device)
    groups = {size: _my_group(size, num_ranks, rank) for size in group_sizes(num_ranks)}
    buffers = {num_bytes: torch.zeros(num_bytes // 4, device=device) for num_bytes in _SIZES_BYTES}
    pair = rank ^ 1 if rank ^ 1 < num_ranks else None
    all_reduces: dict[tuple[int, int], list[float]] = {(s, b): [] for s in groups for b in _SIZES_BYTES}
    sends: dict[int, list[float]] = {num_bytes: [] for num_bytes in _SIZES_BYTES}
    done = -1  # the first round warms up
    while done < 0 or keep_going(done):
        for num_bytes, buffer in buffers.items():
            for size, group in groups.items():
                together()
                seconds = watch(dist.all_reduce, buffer, group=group)
                all_reduces[size, num_bytes].append(seconds)
            together()
            if pair is not None:
                sends[num_bytes].append(_one_way_s(watch, buffer, pair, first=rank < pair))
        if done < 0:
            for timings in (*all_reduces.values(), *sends.values()):
                timings.clear()
        done += 1
    found = [
        CommunicationTiming(
            kind="all_reduce", num_ranks=size, world_size=num_ranks, num_bytes=num_bytes, seconds=sample_of(timings)
        )
        for (size, num_bytes), timings in all_reduces.items()
    ]
    found += [
        CommunicationTiming(
            kind="send", num_ranks=2, world_size=num_ranks, num_bytes=num_bytes, seconds=sample_of(timings)
        )
        for num_bytes, timings in sends.items()
    ]
    return found


def _my_group(size: int, num_ranks: int, rank: int) -> dist.ProcessGroup:
    """This rank's group of neighbours; every rank makes all groups."""
    mine = None
    for first in range(0, num_ranks, size):
        members = list(range(first, first + size))
        group = dist.new_group(members)
        if rank in members:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _one_way_s(watch: Stopwatch, buffer: torch.Tensor, pair: int, *, first: bool) -> float:
    """Half of a there and back, several in a row."""

    def there_and_back() -> None:
        for _ in range(_MESSAGES_PER_TIMING):
            if first:
                dist.send(buffer, pair)
                dist.recv(buffer, pair)
            else:
                dist.recv(buffer, pair)
                dist.send(buffer, pair)

    return watch(there_and_back) / (2 * _MESSAGES_PER_TIMING)
