"""Communication algorithms of gloo between processes, as called by torch's ProcessGroupGloo.

All collectives except broadcast and all-to-all are rings, whose chunks (at most 1 MiB) are pipelined, so a link is busy
throughout. A reduce-scatter is a full all-reduce of which every rank keeps its part: torch has no other on gloo. Bytes
sent per rank, as a fraction of the buffer size, for n ranks:

- all-reduce and reduce-scatter: 2 (n-1)/n;
- all-gather and all-to-all: (n-1)/n; an all-to-all takes n/(n-1) times the time of these bytes, an all-gather of two
  ranks 3/2 times (below);
- broadcast: a binomial tree without chunks, in which all transfers of a sender run together and share its link. A rank
  forwards when it has the whole buffer: 3 times the buffer for four ranks, 4 times for five, 6 times for eight.

Two ranks share one connection. On it, a rank's ready-to-receive notice queues behind its own outgoing bytes, and a
sender waits for that notice. The last rank to arrive knows that the others are ready and sends immediately. If that
rank sends before its own notice, the others wait for its bytes. An all-to-all of two ranks therefore transfers in one
direction after the other (half duplex), as does a hop of a ring of two. In an all-to-all of more ranks, the last to
arrive receives from its first partners while it sends to the next ones, and waits for the part of one; the links on
its way wait with it. An all-gather of two ranks (in halves) transfers in both directions during one third of its time.
An all-reduce sends its notice first. P2P transfers in opposite directions between two ranks are serialized as well
(``simplan.sim.engine``). In larger rings a rank receives from another rank than it sends to.

Source: pytorch/gloo at 70dc360272df, gloo/allreduce.cc (ring), allgather.cc, broadcast.cc, alltoall.cc,
transport/tcp/pair.cc; torch 2.13, ProcessGroupGloo. Counted on links of 100, 400 and 1600 Mbit/s between 2 and 4 nodes
(docs/explanation/communication.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from simplan.cost.communication.algorithm import CommAlgorithm, Pattern, TransferTerm
from simplan.cost.communication.route import Route
from simplan.model.layer import CollectiveKind


def gloo_way(kind: CollectiveKind, route: Route) -> CommAlgorithm:
    """Returns gloo's algorithm for a kind of communication.

    A ring leaves a node once, over the network of all ranks that the group has on the node.
    """
    n, tier = route.num_ranks, route.slowest
    pair_bytes_per_s = tier.pair_bytes_per_s
    ring_bytes_per_s = tier.group_bytes_per_s if route.between is not None else pair_bytes_per_s
    pattern, duplex = Pattern.GLOO_RING, 1.0
    match kind:
        case CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE_SCATTER:
            steps, move = 2 * (n - 1), TransferTerm(2 * (n - 1) / n, ring_bytes_per_s, f"{2 * (n - 1)}/{{n}} x ", n)
        case CollectiveKind.ALL_GATHER:
            turns, text = (3 / 2, "3/2 x ") if n == 2 else (1.0, "")
            steps, move = n - 1, TransferTerm(turns * (n - 1) / n, ring_bytes_per_s, f"{text}{n - 1}/{{n}} x ", n)
            duplex = turns
        case CollectiveKind.ALL_TO_ALL:
            peers = n - route.local if route.between is not None else n - 1
            steps, move = 1, TransferTerm(peers / (n - 1), pair_bytes_per_s, f"{peers}/{n - 1} x ")
            pattern, duplex = Pattern.PAIRWISE, n / (n - 1)
        case CollectiveKind.BROADCAST:
            times = sum(phase.duration for phase in broadcast_phases(n))
            steps = (n - 1).bit_length()
            move = TransferTerm(times, pair_bytes_per_s, f"{times} x " if times > 1 else "")
            pattern = Pattern.BINOMIAL_TREE
        case CollectiveKind.RING if n == 2:
            steps, move = 1, TransferTerm(2.0, pair_bytes_per_s, "2 x ")
            pattern, duplex = Pattern.HOP, 2.0
        case CollectiveKind.RING | CollectiveKind.SEND:
            steps, move = 1, TransferTerm(1.0, pair_bytes_per_s)
            pattern = Pattern.HOP
    inside = 1.0
    if route.inside is not None:  # transfers inside nodes end with those between nodes
        least = 0.0 if route.between is None else move.bytes_per_s / route.inside.link.bytes_per_s
        inside = max(route.inside.pair_efficiency, least) / duplex
    between = 1.0 if route.between is None else route.between.pair_efficiency / duplex
    return CommAlgorithm("gloo", 0.0, ((steps, tier.latency_s),), (move,), pattern, inside, between)


class BroadcastPhase(NamedTuple):
    """Part of a broadcast in which the same ranks send.

    Attributes:
        duration: Its time, over that of one transfer of the buffer.
        sends: Places of sender and receiver in the group, and the fraction of the buffer that is sent.
    """

    duration: int
    sends: Sequence[tuple[int, int, float]]


@cache
def broadcast_phases(num_ranks: int) -> tuple[BroadcastPhase, ...]:
    """Returns the phases of a broadcast from the first rank, in sequence.

    A rank that gets the buffer in round r sends to the ranks 2**r, 2**(r+1) ... places later, all together.

    >>> [sum(phase.duration for phase in broadcast_phases(n)) for n in (2, 3, 4, 5, 6, 8, 16)]
    [1, 2, 3, 4, 5, 6, 10]
    """
    has, sends = [0] * num_ranks, list[tuple[int, int, int, int]]()
    for place in range(num_ranks):
        later = [place + (1 << bit) for bit in range(place.bit_length(), num_ranks.bit_length())]
        receivers = [receiver for receiver in later if receiver < num_ranks]
        for receiver in receivers:
            has[receiver] = has[place] + len(receivers)
            sends.append((has[place], has[receiver], place, receiver))
    times = sorted({time for begin, end, *_ in sends for time in (begin, end)})
    return tuple(
        BroadcastPhase(
            until - since,
            [
                (sender, receiver, (until - since) / (end - begin))
                for begin, end, sender, receiver in sends
                if begin <= since and until <= end
            ],
        )
        for since, until in pairwise(times)
    )
