"""Times collectives and messages over sizes, all ranks of the machine taking part at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from executor.timing import Stopwatch, sample_of, together
from simplan.cost.calibration import CommunicationTiming
from simplan.spec.layer import CollectiveKind
from simplan.units import KIB, MIB

__all__ = ["group_sizes", "time_links"]

_SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
_MESSAGES_PER_TIMING = 4
_ELEMENT_BYTES = 4  # fp32


def group_sizes(num_ranks: int) -> list[int]:
    """Sizes of groups that divide the ranks evenly, smallest first."""
    return [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]


def time_links(
    kinds: Sequence[CollectiveKind], num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]
) -> list[CommunicationTiming]:
    """Times collectives in groups of every even division, and sends between neighbours.

    Args:
        kinds: What to time.
        num_ranks: Ranks of the machine.
        device: Where the buffers are.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    watch = Stopwatch(device)
    buffers = [
        (torch.zeros(b // _ELEMENT_BYTES, device=device), torch.zeros(b // _ELEMENT_BYTES, device=device))
        for b in _SIZES_BYTES
    ]
    links: list[_Link] = []
    if set(kinds) - {CollectiveKind.SEND}:
        for size in group_sizes(num_ranks):
            group = _my_group(size, num_ranks)
            for whole, spare in buffers:
                links += _collectives(kinds, group, whole, spare)
    if CollectiveKind.SEND in kinds:
        links += (_send(whole, num_ranks) for whole, _ in buffers)
    done = -1  # the first round warms up
    while done < 0 or keep_going(done):
        for link in links:
            together()
            if link.run is not None:
                link.seconds.append(watch(link.run) / link.repeats)
        if done < 0:
            for link in links:
                link.seconds.clear()
        done += 1
    return [
        CommunicationTiming(
            kind=link.kind,
            num_ranks=link.num_ranks,
            world_size=num_ranks,
            num_bytes=link.num_bytes,
            seconds=sample_of(link.seconds),
        )
        for link in links
    ]


@dataclass(slots=True)
class _Link:
    """One thing to time.

    Attributes:
        kind, num_ranks, num_bytes: As in ``CommunicationTiming``.
        run: Does it; None for a rank that has no part in it.
        repeats: How often ``run`` does it.
        seconds: What it took, by round.
    """

    kind: CollectiveKind
    num_ranks: int
    num_bytes: int
    run: Callable[[], object] | None
    repeats: int = 1
    seconds: list[float] = field(default_factory=list)


def _my_group(size: int, num_ranks: int) -> dist.ProcessGroup:
    """This rank's group of neighbours; every rank makes all groups."""
    mine = None
    for first in range(0, num_ranks, size):
        members = list(range(first, first + size))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _collectives(
    kinds: Sequence[CollectiveKind], group: dist.ProcessGroup, whole: Tensor, spare: Tensor
) -> Iterator[_Link]:
    """Every kind on buffers of one size, cut to a multiple of the group's size."""
    members = dist.get_process_group_ranks(group)
    n, mine = len(members), dist.get_rank(group)
    part = whole.numel() // n
    whole, spare = whole[: part * n], spare[: part * n]
    own = whole[mine * part : (mine + 1) * part]  # FSDP gathers in place
    calls: dict[CollectiveKind, Callable[[], object]] = {
        CollectiveKind.ALL_REDUCE: partial(dist.all_reduce, whole, group=group),
        CollectiveKind.ALL_GATHER: partial(dist.all_gather_into_tensor, whole, own, group=group),
        CollectiveKind.REDUCE_SCATTER: partial(dist.reduce_scatter_tensor, spare[:part], whole, group=group),
        CollectiveKind.ALL_TO_ALL: partial(dist.all_to_all_single, spare, whole, group=group),
        CollectiveKind.BROADCAST: partial(dist.broadcast, whole, members[0], group=group),
        CollectiveKind.RING: partial(_pass_on, whole, spare, members[(mine + 1) % n], members[(mine - 1) % n], group),
    }
    return (_Link(kind, n, whole.nbytes, calls[kind]) for kind in kinds if kind in calls)


def _pass_on(sent: Tensor, received: Tensor, to: int, source: int, group: dist.ProcessGroup) -> None:
    """One hop round the ring, all ranks at once."""
    both = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _send(buffer: Tensor, num_ranks: int) -> _Link:
    """There and back between neighbours, several times: half of it is one way."""
    rank = dist.get_rank()
    pair = rank ^ 1
    run = partial(_there_and_back, buffer, pair, first=rank < pair) if pair < num_ranks else None
    return _Link(CollectiveKind.SEND, 2, buffer.nbytes, run, repeats=2 * _MESSAGES_PER_TIMING)


def _there_and_back(buffer: Tensor, pair: int, *, first: bool) -> None:
    for _ in range(_MESSAGES_PER_TIMING):
        if first:
            dist.send(buffer, pair)
            dist.recv(buffer, pair)
        else:
            dist.recv(buffer, pair)
            dist.send(buffer, pair)
