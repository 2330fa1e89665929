"""What gloo sends between processes, as torch's ProcessGroupGloo calls it.

All but the broadcast and the all-to-all are rings, whose parts (at most 1 MiB) follow each other without waiting, so
that a link is busy throughout. A reduce-scatter is a whole all-reduce of which every rank keeps its part: torch has no
other on gloo. Bytes a rank sends of a message over n ranks:

- all-reduce and reduce-scatter: 2 (n-1)/n;
- all-gather and all-to-all: (n-1)/n; an all-to-all takes twice as long as these bytes, an all-gather of two ranks 3/2
  times (below);
- broadcast: a binomial tree without parts, in which a sender's messages share its link: d (d+1)/2 times the message
  for depth d, one after the other.

Two ranks share one connection. On it, that a rank is ready to receive is said behind the bytes that it sends, and a
sender waits to be told so. Who comes last knows that the others are ready and sends at once; where it sends before it
says that it is ready, the others wait for its bytes. An all-to-all thus has one direction after the other, as a hop
round a ring of two has; an all-gather of two (in halves) goes both ways in one of three parts of its time; an
all-reduce says first that it is ready. Messages that two ranks send each other at the same time take turns as well
(``simplan.sim.engine``). Larger rings receive from another rank than they send to.

Source: pytorch/gloo at 70dc360272df, gloo/allreduce.cc (ring), allgather.cc, broadcast.cc, alltoall.cc,
transport/tcp/pair.cc; torch 2.13, ProcessGroupGloo. Counted on links of 100, 400 and 1600 Mbit/s between 2 and 4 hosts
(docs/explanation/communication.md).
"""

from __future__ import annotations

from simplan.cost.communication.algorithm import CommAlgorithm, TransferTerm
from simplan.cost.communication.route import Route
from simplan.model.layer import CollectiveKind

__all__ = ["gloo_way"]


def gloo_way(kind: CollectiveKind, route: Route) -> CommAlgorithm:
    """The way gloo takes.

    A ring leaves a node once, over the network of all the group's ranks there.

    Args:
        kind: How bytes move.
        route: Where the ranks are.
    """
    n, tier = route.num_ranks, route.slowest
    ring_bytes_per_s = tier.group_bytes_per_s if route.between is not None else tier.pair_bytes_per_s
    match kind:
        case CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE_SCATTER:
            steps, move = 2 * (n - 1), TransferTerm(2 * (n - 1) / n, ring_bytes_per_s, f"{2 * (n - 1)}/{{n}} x ", n)
        case CollectiveKind.ALL_GATHER:
            turns, text = (3 / 2, "3/2 x ") if n == 2 else (1.0, "")
            steps, move = n - 1, TransferTerm(turns * (n - 1) / n, ring_bytes_per_s, f"{text}{n - 1}/{{n}} x ", n)
        case CollectiveKind.ALL_TO_ALL:
            peers = n - route.local if route.between is not None else n - 1
            steps, move = 1, TransferTerm(2 * peers / n, tier.pair_bytes_per_s, f"2 x {peers}/{{n}} x ", n)
        case CollectiveKind.BROADCAST:
            depth = (n - 1).bit_length()
            times = depth * (depth + 1) // 2
            steps, move = depth, TransferTerm(times, tier.pair_bytes_per_s, f"{times} x " if times > 1 else "")
        case CollectiveKind.RING:
            steps = 1
            move = (
                TransferTerm(2.0, tier.pair_bytes_per_s, "2 x ") if n == 2 else TransferTerm(1.0, tier.pair_bytes_per_s)
            )
        case CollectiveKind.SEND:
            steps, move = 1, TransferTerm(1.0, tier.pair_bytes_per_s)
    return CommAlgorithm("gloo", 0.0, ((steps, tier.latency_s),), (move,))
