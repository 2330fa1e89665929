"""Times collectives and messages over sizes, all ranks of the machine taking part at once.

Ranks do not come to a collective at the same moment, and gloo's ways differ when they do not: a rank that sends before
it says that it is ready to receive has the others wait for its bytes (``simplan/cost/gloo.py``). So one rank, each in
turn, comes late, and its time counts, since a collective begins when the last rank has come.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from executor.calibration.timing import Stopwatch, gathered, sample_of, together, wide
from executor.distributed.activation_offload import HostLink
from simplan.cost.calibration import CommunicationTiming, HostCopyTiming
from simplan.spec.layer import CollectiveKind
from simplan.units import KIB, MIB

__all__ = ["Link", "group_shapes", "receiving_s", "time_host_copies", "time_links", "warmed_up"]

_SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
_MESSAGES_PER_TIMING = 4  # of up to a quarter of a MiB, else 1
_LATE_S = 1e-3  # longer than a message's way, and about as far apart as ranks come in a step
_LEAST_ROUNDS = 7  # so many of the longest timings of a curve must fit into its part of the time there is
_ALWAYS_S = 0.2  # what takes no longer is timed however little time there is
_SURELY_TIMED_BYTES = 64 * KIB
_ELEMENT_BYTES = 4  # fp32


def group_shapes(num_ranks: int, ranks_per_node: int) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Groups by shape: (ranks, nodes they are spread over) -> all groups of that shape, which cover all ranks.

    Neighbours of every even division, and, where there are several nodes, one rank of each node.

    >>> sorted(group_shapes(8, 4))
    [(2, 1), (2, 2), (4, 1), (8, 2)]
    """
    shapes: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for size in range(2, num_ranks + 1):
        if num_ranks % size == 0:
            groups = [tuple(range(first, first + size)) for first in range(0, num_ranks, size)]
            spread = {len({rank // ranks_per_node for rank in group}) for group in groups}
            if len(spread) == 1:  # groups that are not alike have no time in common
                shapes[size, spread.pop()] = groups
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node == 0:
        across = [tuple(range(first, num_ranks, ranks_per_node)) for first in range(ranks_per_node)]
        shapes.setdefault((len(across[0]), len(across[0])), across)
    return shapes


def time_links(
    kinds: Sequence[CollectiveKind],
    num_ranks: int,
    device: torch.device,
    keep_going: Callable[[int], bool],
    *,
    ranks_per_node: int | None = None,
    budget_s: float = math.inf,
) -> list[CommunicationTiming]:
    """Times collectives in groups of every shape, and messages between neighbours, inside of nodes and across.

    Args:
        kinds: What to time.
        num_ranks: Ranks, all of which take part.
        device: Where the buffers are.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
        ranks_per_node: How many of them share a node; None for all.
        budget_s: Time there is; sizes that would take more than their part of it are left out.
    """
    watch, per_node = Stopwatch(device), ranks_per_node or num_ranks
    buffers = [
        (torch.zeros(b // _ELEMENT_BYTES, device=device), torch.zeros(b // _ELEMENT_BYTES, device=device))
        for b in _SIZES_BYTES
    ]
    links: list[Link] = []
    if set(kinds) - {CollectiveKind.SEND}:
        for (_, num_nodes), groups in group_shapes(num_ranks, per_node).items():
            group = _my_group(groups)
            for whole, spare in buffers:
                links += _collectives(kinds, group, num_nodes, whole, spare)
    if CollectiveKind.SEND in kinds:
        distances = [1, per_node] if 1 < per_node < num_ranks else [1]
        for distance in distances:
            links += (_send(whole, num_ranks, distance, per_node) for whole, _ in buffers)
    links = warmed_up(links, watch, budget_s)
    done, still_open = 0, links
    while still_open and keep_going(done):
        for link in still_open:
            _time(link, watch, done)
        done += 1
        found = gathered([link.seconds for link in still_open])
        still_open = [link for link, *of_ranks in zip(still_open, *found, strict=True) if wide([*chain(*of_ranks)])]
    return [
        CommunicationTiming(
            kind=link.kind,
            num_ranks=link.num_ranks,
            world_size=per_node,
            num_bytes=link.num_bytes,
            seconds=sample_of(link.seconds),
            num_nodes=link.num_nodes,
        )
        for link in links
    ]


def warmed_up(links: list[Link], watch: Stopwatch, budget_s: float) -> list[Link]:
    """Does every link once, smallest sizes first; gives those that do not take too long, judged by the size before.

    Args:
        links: Of any number of curves; the same on all ranks.
        watch: Times them.
        budget_s: Time there is for all of them.
    """
    allowed_s = max(_ALWAYS_S, budget_s / _LEAST_ROUNDS / len({link.curve for link in links}))
    before: dict[tuple[CollectiveKind, int, int], tuple[int, float]] = {}  # bytes moved, seconds
    found = []
    for link in sorted(links, key=lambda link: link.num_bytes):
        moved = link.num_bytes * link.repeats
        moved_before, longest_s = before.get(link.curve, (moved, 0.0))
        if link.num_bytes > _SURELY_TIMED_BYTES and longest_s * moved / moved_before > allowed_s:
            continue
        together()
        longest_s = max(gathered(0.0 if link.run is None else watch(link.run)))
        before[link.curve] = moved, longest_s
        found.append(link)
    return found


def _time(link: Link, watch: Stopwatch, number: int) -> None:
    """Does a link once, all ranks together but for the one that is late."""
    together()
    late = link.root if link.root is not None else number % link.num_ranks
    began_s, late_s, took_s = time.perf_counter(), 0.0, 0.0
    if link.run is not None:
        if link.place == late:
            time.sleep(_LATE_S)
            late_s = time.perf_counter() - began_s  # a sleep is longer than asked for
        took_s = watch(link.run)
    if link.root is not None:
        late_s = max(gathered(late_s))
    if link.run is None:
        return
    if link.place is None:
        if link.counts:
            link.seconds.append(took_s / link.repeats)
    elif link.root is None and link.place == late:
        link.seconds.append(took_s)
    elif link.root is not None and link.place != late:  # the root is done when it has sent
        link.seconds.append(receiving_s(took_s, late_s))


def receiving_s(took_s: float, late_s: float) -> float:
    """Seconds of a message whose root set out late, from how long a receiver was at it.

    A receiver that was even later than the root, on a busy machine, waited for nothing: all it took is the message's.

    Args:
        took_s: Of the receiver.
        late_s: By how much the root was late, as it measured it.
    """
    return took_s - late_s if took_s > late_s else took_s


@dataclass(slots=True)
class Link:
    """One collective or message to time.

    Attributes:
        kind, num_ranks, num_nodes, num_bytes: As in ``CommunicationTiming``.
        run: Does it; None for a rank that has no part in it.
        place: This rank's in the group, of which one is late; None for messages, before which each end waits.
        root: Place of the only rank that sends something of its own; None where all do.
        repeats: How often ``run`` does it.
        counts: Whether this rank's time of messages counts: that of the end that receives the last one, for a send is
            over when its bytes are in a buffer.
        seconds: What it took, by round.
    """

    kind: CollectiveKind
    num_ranks: int
    num_nodes: int
    num_bytes: int
    run: Callable[[], object] | None
    place: int | None = None
    root: int | None = None
    repeats: int = 1
    counts: bool = True
    seconds: list[float] = field(default_factory=list)

    @property
    def curve(self) -> tuple[CollectiveKind, int, int]:
        """What its sizes have in common."""
        return self.kind, self.num_ranks, self.num_nodes


def _my_group(groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
    """This rank's of them; every rank makes all."""
    mine = None
    for members in groups:
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _collectives(
    kinds: Sequence[CollectiveKind], group: dist.ProcessGroup, num_nodes: int, whole: Tensor, spare: Tensor
) -> Iterator[Link]:
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
    roots = {CollectiveKind.BROADCAST: 0}
    return (
        Link(kind, n, num_nodes, whole.nbytes, calls[kind], mine, roots.get(kind)) for kind in kinds if kind in calls
    )


def _pass_on(sent: Tensor, received: Tensor, to: int, source: int, group: dist.ProcessGroup) -> None:
    """One hop round the ring, all ranks at once."""
    both = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _send(buffer: Tensor, num_ranks: int, distance: int, ranks_per_node: int) -> Link:
    """There and back between pairs of ranks so far apart, several times: half of it is one way."""
    rank = dist.get_rank()
    first = rank // distance % 2 == 0
    pair = rank + distance if first else rank - distance
    num_nodes = 1 if distance < ranks_per_node else 2
    times = _MESSAGES_PER_TIMING if buffer.nbytes < MIB else 1
    run = partial(_there_and_back, buffer, pair, times, first=first) if pair < num_ranks else None
    return Link(CollectiveKind.SEND, 2, num_nodes, buffer.nbytes, run, repeats=2 * times, counts=first)


def _there_and_back(buffer: Tensor, pair: int, times: int, *, first: bool) -> None:
    for _ in range(times):
        if first:
            dist.send(buffer, pair)
            dist.recv(buffer, pair)
        else:
            dist.recv(buffer, pair)
            dist.send(buffer, pair)


_COPY_SIZES_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)


def time_host_copies(num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]) -> list[HostCopyTiming]:
    """Times copies into buffers that are made for them, as the executor makes them.

    Args:
        num_ranks: Ranks of the machine.
        device: Where the tensors are.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    watch, link = Stopwatch(device), HostLink(device)
    tensors = [torch.zeros(num_bytes // 4, device=device) for num_bytes in _COPY_SIZES_BYTES]
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
