"""Times communication on all ranks simultaneously: collectives, P2P sends, host copies, overlap with matmuls.

Ranks do not enter a collective simultaneously, and gloo's algorithms differ when they do not: a rank that sends before
it says that it is ready to receive makes the others wait for its bytes (``simplan/cost/communication/gloo.py``).
Therefore one rank after the other arrives late, and its time counts, since a collective begins when the last rank has
entered it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from executor.calibration.timing import TIMED_DTYPES, Bench, Stopwatch, gathered, sample_of, together, wide
from executor.distributed.activation_offload import HostLink
from executor.distributed.mesh import run_timeout
from simplan.cost.calibration.format import CommunicationTiming, HostCopyTiming, OverlapTiming, TimedDtype
from simplan.model.layer import CollectiveKind
from simplan.units import KIB, MIB

_SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_COPY_SIZES_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
_SENDS_PER_TIMING = 4  # of less than a MiB, else 1
_LATE_S = 1e-3  # longer than a P2P send's latency, and about as far apart as ranks arrive in a step
_MIN_ROUNDS = 7  # number of the longest timings of a curve that must fit into its part of the budget
_ALWAYS_S = 0.2  # shorter timings are made regardless of the budget
_ALWAYS_BYTES = 64 * KIB
_ELEMENT_BYTES = 4  # FP32
_NUM_OVERLAPPED = 4  # collectives


def group_shapes(num_ranks: int, ranks_per_node: int) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Groups by shape: (ranks, nodes of a group) -> all groups of that shape, which cover all ranks.

    Groups are the neighbors of every even division, and, with several nodes, one rank of each node.

    >>> sorted(group_shapes(8, 4))
    [(2, 1), (2, 2), (4, 1), (8, 2)]
    """
    shapes: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for size in range(2, num_ranks + 1):
        if num_ranks % size == 0:
            groups = [tuple(range(first, first + size)) for first in range(0, num_ranks, size)]
            spread = {len({rank // ranks_per_node for rank in group}) for group in groups}
            if len(spread) == 1:  # groups over different numbers of nodes have no common time
                shapes[size, spread.pop()] = groups
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node == 0:
        across = [tuple(range(first, num_ranks, ranks_per_node)) for first in range(ranks_per_node)]
        shapes.setdefault((len(across[0]), len(across[0])), across)
    return shapes


def time_links(
    kinds: Sequence[CollectiveKind], bench: Bench, *, num_nodes: int = 1, budget_s: float = math.inf
) -> list[CommunicationTiming]:
    """Times collectives in groups of every shape, and P2P sends between neighbors, inside nodes and across them.

    Args:
        budget_s: Time for the measurement in seconds; sizes that would exceed their part of the budget are skipped.
    """
    watch, per_node = Stopwatch(bench.device), bench.num_ranks
    num_ranks = per_node * num_nodes
    buffers = [torch.zeros(2, b // _ELEMENT_BYTES, device=bench.device).unbind() for b in _SIZES_BYTES]
    links: list[TimedLink] = []
    if set(kinds) - {CollectiveKind.SEND}:
        for (_, nodes_of_group), groups in group_shapes(num_ranks, per_node).items():
            group = _my_group(groups)
            for whole, spare in buffers:
                links += collectives_of(kinds, group, nodes_of_group, whole, spare)
    if CollectiveKind.SEND in kinds:
        for distance in [1, per_node] if 1 < per_node < num_ranks else [1]:
            links += (_send(whole, num_ranks, distance, per_node) for whole, _ in buffers)
    links = warmed_up(links, watch, budget_s)
    still_open, done = links, 0
    while still_open and bench.keep_going(done):
        for link in still_open:
            _time(link, watch, done)
        of_ranks = zip(*gathered([link.seconds for link in still_open]), strict=True)
        still_open = [link for link, seconds in zip(still_open, of_ranks, strict=True) if wide([*chain(*seconds)])]
        done += 1
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


def warmed_up(links: list[TimedLink], watch: Stopwatch, budget_s: float) -> list[TimedLink]:
    """Runs every link once, smallest sizes first; leaves out those that take too long, judged by the size before.

    Args:
        links: Links of any number of curves, the same on all ranks.
        budget_s: Time for all links.
    """
    allowed_s = max(_ALWAYS_S, budget_s / _MIN_ROUNDS / len({link.curve for link in links}))
    before: dict[tuple[CollectiveKind, int, int], tuple[int, float]] = {}  # bytes moved, seconds
    short_enough = []
    for link in sorted(links, key=lambda link: link.num_bytes):
        moved = link.num_bytes * link.repeats
        moved_before, longest_s = before.get(link.curve, (moved, 0.0))
        if link.num_bytes > _ALWAYS_BYTES and longest_s * moved / moved_before > allowed_s:
            continue
        together()
        longest_s = max(gathered(0.0 if link.run is None else watch(link.run)))
        before[link.curve] = moved, longest_s
        short_enough.append(link)
    return short_enough


def _time(link: TimedLink, watch: Stopwatch, number: int) -> None:
    """Times a link once, all ranks together except the late one."""
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
    if link.place is None and link.counts:
        link.seconds.append(took_s / link.repeats)
    elif link.root is None and link.place == late:
        link.seconds.append(took_s)
    elif link.root is not None and link.place != late:  # the root has ended when it has sent
        link.seconds.append(receiving_s(took_s, late_s))


def receiving_s(took_s: float, late_s: float) -> float:
    """Seconds of a broadcast whose root was late, from the time of a receiver.

    A receiver that was even later than the root, on a busy machine, did not wait: all of its time is the broadcast's.

    Args:
        late_s: Delay of the root, as the root measured it.
    """
    return took_s - late_s if took_s > late_s else took_s


@dataclass(slots=True)
class TimedLink:
    """Collective or P2P send to time.

    Attributes:
        kind, num_ranks, num_nodes, num_bytes: As in ``CommunicationTiming``.
        run: Runs the collective; None for a rank that does not take part.
        place: This rank's index in the group, of which one rank is late; None for P2P sends, which no rank delays.
        root: Index of the root; None for collectives without a root.
        repeats: Number of sends in ``run``.
        counts: This rank's time of P2P sends counts: that of the rank with the last receive, because a send returns
            when its bytes are in a buffer.
        seconds: Timings by round.
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
        """Everything except the size."""
        return self.kind, self.num_ranks, self.num_nodes


def _my_group(groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
    """This rank's group; every rank makes all groups."""
    members = list(map(list, groups))
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=run_timeout())  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return group


def collectives_of(
    kinds: Sequence[CollectiveKind], group: dist.ProcessGroup, num_nodes: int, whole: Tensor, spare: Tensor
) -> Iterator[TimedLink]:
    """Collectives of every kind on buffers of one size, cut to a multiple of the group's size."""
    members = dist.get_process_group_ranks(group)
    n, mine = len(members), dist.get_rank(group)
    part = whole.numel() // n
    whole, spare = whole[: part * n], spare[: part * n]
    calls: dict[CollectiveKind, Callable[[], object]] = {
        CollectiveKind.ALL_REDUCE: partial(dist.all_reduce, whole, group=group),
        CollectiveKind.ALL_GATHER: partial(_gather, whole, slice(mine * part, (mine + 1) * part), group),
        CollectiveKind.REDUCE_SCATTER: partial(dist.reduce_scatter_tensor, spare[:part], whole, group=group),
        CollectiveKind.ALL_TO_ALL: partial(dist.all_to_all_single, spare, whole, group=group),
        CollectiveKind.BROADCAST: partial(dist.broadcast, whole, members[0], group=group),
        CollectiveKind.RING: partial(_pass_on, whole, spare, members[(mine + 1) % n], members[(mine - 1) % n], group),
    }
    roots = {CollectiveKind.BROADCAST: 0}
    return (
        TimedLink(kind, n, num_nodes, whole.nbytes, calls[kind], mine, roots.get(kind))
        for kind in kinds
        if kind in calls
    )


def _gather(like: Tensor, part: slice, group: dist.ProcessGroup) -> None:
    """A gather as FSDP makes it: in place, into a buffer that is allocated each time."""
    whole = torch.empty_like(like)
    dist.all_gather_into_tensor(whole, whole[part], group=group)


def _pass_on(sent: Tensor, received: Tensor, to: int, source: int, group: dist.ProcessGroup) -> None:
    """One hop of the ring, on all ranks simultaneously."""
    both = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _send(buffer: Tensor, num_ranks: int, distance: int, ranks_per_node: int) -> TimedLink:
    """Ping-pong between pairs of ranks at a distance; half of the time is one send."""
    rank = dist.get_rank()
    first = rank // distance % 2 == 0
    pair = rank + distance if first else rank - distance
    num_nodes = 1 if distance < ranks_per_node else 2
    times = _SENDS_PER_TIMING if buffer.nbytes < MIB else 1
    run = partial(_there_and_back, buffer, pair, times, first=first) if pair < num_ranks else None
    return TimedLink(CollectiveKind.SEND, 2, num_nodes, buffer.nbytes, run, repeats=2 * times, counts=first)


def _there_and_back(buffer: Tensor, pair: int, times: int, *, first: bool) -> None:
    for _ in range(times):
        if first:
            dist.send(buffer, pair)
            dist.recv(buffer, pair)
        else:
            dist.recv(buffer, pair)
            dist.send(buffer, pair)


def time_host_copies(bench: Bench) -> list[HostCopyTiming]:
    """Times copies into new host buffers, as the executor makes them."""
    watch, link = Stopwatch(bench.device), HostLink(bench.device)
    tensors = [torch.zeros(num_bytes // _ELEMENT_BYTES, device=bench.device) for num_bytes in _COPY_SIZES_BYTES]
    seconds: list[list[float]] = [[] for _ in tensors]

    def copy(tensor: Tensor) -> None:
        link.wait(link.send(tensor, link.host_buffer(tensor)))

    done = -1  # the first round warms up
    while done < 0 or bench.keep_going(done):
        for tensor, timings in zip(tensors, seconds, strict=True):
            together()
            took_s = watch(copy, tensor)
            if done >= 0:
                timings.append(took_s)
        done += 1
    return [
        HostCopyTiming(world_size=bench.num_ranks, num_bytes=tensor.nbytes, seconds=sample_of(timings))
        for tensor, timings in zip(tensors, seconds, strict=True)
    ]


def time_overlap(dtype: TimedDtype, bench: Bench, *, small: bool = False) -> list[OverlapTiming]:
    """Times matmuls of the duration of a few all-reduces: each separately, then both overlapped.

    Args:
        small: Smaller all-reduces.
    """
    watch, device = Stopwatch(bench.device), bench.device
    side = 4096 if device.type == "cuda" else 256
    buffer = torch.zeros((MIB if small else 16 * MIB) // _ELEMENT_BYTES, device=device)
    a, b = torch.randn(2, side, side, device=device).to(TIMED_DTYPES[dtype])
    works: list[dist.Work] = []

    def matmuls(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b)

    def begin() -> None:
        started = (dist.all_reduce(buffer, async_op=True) for _ in range(_NUM_OVERLAPPED))
        works.extend(work for work in started if work is not None)

    def wait() -> None:
        while works:
            works.pop(0).wait()

    def all_reduces() -> None:
        begin()
        wait()

    matmuls(1)
    all_reduces()
    together()
    communication_s = watch(all_reduces)
    matmul_s = min(watch(matmuls, 1) for _ in range(5))
    num_matmuls = int(statistics.median(gathered(max(1, round(communication_s / matmul_s)))))
    slowdowns: list[tuple[float, float]] = []
    while bench.keep_going(len(slowdowns)):
        together()
        compute_s = watch(matmuls, num_matmuls)
        together()
        communication_s = watch(all_reduces)
        together()
        both = watch.overlapped(begin, partial(matmuls, num_matmuls), wait)
        slowdowns.append((_slowdown(compute_s, *both), _slowdown(communication_s, *reversed(both))))
    compute, communication = (
        max(1.0, statistics.median(gathered(statistics.median(of_round)))) for of_round in zip(*slowdowns, strict=True)
    )
    return [
        OverlapTiming(
            kind=CollectiveKind.ALL_REDUCE,
            num_ranks=bench.num_ranks,
            num_bytes=buffer.nbytes,
            compute_slowdown=compute,
            communication_slowdown=communication,
        )
    ]


def _slowdown(alone_s: float, overlapped_s: float, other_s: float) -> float:
    """Slowdown while the other work runs; the part after the other work's end has full speed.

    With slowdown f, time alone t and the other's end e < f t: overlapped = e + (t - e / f), so
    f = e / (t + e - overlapped).
    """
    if overlapped_s <= other_s:
        return overlapped_s / alone_s
    left_s = alone_s + other_s - overlapped_s
    return other_s / left_s if left_s > 0 else overlapped_s / alone_s
