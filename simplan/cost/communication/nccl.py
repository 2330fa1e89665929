"""Communication algorithms of NCCL (and RCCL), following NCCL's own cost model.

NCCL assigns every algorithm and protocol a latency and a bandwidth and uses the fastest for the given size. simplan
does the same, with the latency of one step and the bandwidth of each link from the catalog. The table of protocols is
NCCL's, as ratios to the step of a ring with protocol Simple: NVIDIA/nccl, src/graph/tuning.cc at 5067397c2676
(``baseLatencies``, ``hwLatencies``, ``llMaxBws``, ``ncclTopoTuneModel``). With n ranks, k of them in each of N nodes, B
bytes:

========= ==================== ============================ =========================================================
algorithm collectives          steps                        bytes over a link
========= ==================== ============================ =========================================================
ring      all                  laps x (n - 1), laps x (N-1) laps x (n-1)/n x B, at the smaller of a device's rate
                               of them between nodes        inside and k devices' on the network (broadcast: B)
tree      all_reduce           2 (k - 1) along a chain in   2 (k-1)/k x B inside; on the network B for two nodes,
                               each node, 2 ceil(log2 N)    else 2 B, as inner nodes of a double binary tree send to
                               between nodes                a parent and two children half of B each
NVLS      all_reduce, inside   one through the switch, 2    (1 + 1/k) x B inside: the switch reads a buffer of every
          a node all_gather,   ceil(log2 N) between nodes   device and writes an n-th of the sum to each; then it
          reduce_scatter                                    takes that n-th and multicasts it. Network as of a tree
pairwise  all_to_all           one, and posting n - 2 more  (n-1)/n x B, the parts of both tiers at the same time
          ring, send           one                          B
========= ==================== ============================ =========================================================

Laps are 2 for an all_reduce, otherwise 1. Rings: Patarasuk and Yuan 2009; double binary trees: Sanders, Speck and Traff
2009; NVLS: NVIDIA/nccl-tests doc/PERFORMANCE.md and Klenk et al. 2020 (in-network reduction over NVLink). Not modeled:
CollNet and SHARP on InfiniBand, PAT, registered buffers, copy engines, NCCL_* settings, cloud transports without LL128.
Two more effects are not modeled: the slowdown of trees at medium sizes (``treeCorrectionFactor``: tried, no gain on
published measurements), and cases where NCCL's choice is not the fastest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from simplan.cost.communication.algorithm import CommAlgorithm, Pattern, PipelineFill, TransferTerm
from simplan.cost.communication.route import Route, Tier
from simplan.model.layer import CollectiveKind
from simplan.program.program import Communication

LAPS = {
    CollectiveKind.ALL_REDUCE: 2,
    CollectiveKind.ALL_GATHER: 1,
    CollectiveKind.REDUCE_SCATTER: 1,
    CollectiveKind.BROADCAST: 1,
}


class Terms(NamedTuple):
    """A protocol on one tier: steps relative to a ring step with Simple, and its fraction of the bandwidth."""

    ring_step: float
    tree_step: float
    share: float


class Protocol(NamedTuple):
    """An NCCL protocol. Every 8 bytes of LL contain 4 bytes of flags, every 128 of LL128 contain 8; Simple has none."""

    name: str
    start_s: float
    inside: Terms
    between: Terms
    post_s: float


# hwLatencies NVLINK: ring 0.6, 1.9, 3.4 us, tree 0.6, 1.25, 4.0; NET: ring 2.7, 4, 14, tree 5, 8.5, 14.
# LL: llMaxBws over the bus bandwidth, 0.36 to 0.42 inside a node and 0.11 between. LL128: 0.92, in its text.
# post_s: getNetOverhead, 1 us to 2 us per call, three times for Simple.
_LL = Protocol("LL", 6.6e-6, Terms(0.18, 0.18, 0.39), Terms(0.19, 0.36, 0.11), 1e-6)
_LL128 = Protocol("LL128", 14.0e-6, Terms(0.56, 0.37, 0.92), Terms(0.29, 0.61, 0.92), 1e-6)
_SIMPLE = Protocol("Simple", 8.4e-6, Terms(1.0, 1.18, 1.0), Terms(1.0, 1.0, 1.0), 3e-6)
PROTOCOLS = (_LL, _LL128, _SIMPLE)
_OF_PAIRS = (_LL, _SIMPLE)
_ALL = Terms(1.0, 1.0, 1.0)
NO_PROTOCOL = Protocol("", 0.0, _ALL, _ALL, 0.0)
"""Algorithms of other libraries, without a protocol of their own."""

_TREE_SHARE = 0.92  # ncclTopoTuneModel: busBw * .92
_TREE_SHARE_BETWEEN_NODES = 0.8
"""Two nodes of A100 or MI355X, which have no NVLS, are as fast as a ring (collectives_2026.yaml, pub-12 and pub-17)."""
_MOST_OF_NVLS_TREE = 8
"""Largest domain that NVLS trees start from. Two racks of 64 GB200 or GB300 are as fast as a ring (pub-07, pub-10)."""
_NVLS_CHANNELS, _NODES_WITH_SMALL_CHUNKS, _NVLS_SMALL_CHUNK = 16, 4, 65_536
_NVLS_CHUNKS = ((32_768, 0), (65_536, 1), (131_072, 4))
"""Bytes of a chunk, and the number of rounds of them from which on a message has them."""
NVLS_STEP_INSIDE, _NVLS_STEP_BETWEEN = 7.35, 1.49  # hwLatencies: 25 of 3.4 us; 20.9 of 14 us


def nccl_ways(communication: Communication, route: Route) -> list[CommAlgorithm]:
    """Returns NCCL's available algorithms for communication among two or more ranks; it uses the fastest."""
    match communication.kind:
        case CollectiveKind.SEND | CollectiveKind.RING:
            return [_hop(protocol, route) for protocol in _OF_PAIRS]
        case CollectiveKind.ALL_TO_ALL:
            return [_pairwise(protocol, communication, route) for protocol in _OF_PAIRS]
    ways = [_ring(protocol, communication.kind, route) for protocol in PROTOCOLS]
    if communication.kind is CollectiveKind.ALL_REDUCE:
        ways += [_tree(protocol, route) for protocol in PROTOCOLS]
    if (
        route.inside is not None
        and route.inside.link.switch_share is not None
        and _switch_can(communication.kind, route)
    ):
        ways.append(_nvls(communication.kind, route, route.inside, route.inside.link.switch_share))
    return ways


def _hop(protocol: Protocol, route: Route) -> CommAlgorithm:
    """Returns the algorithm of a transfer between neighbors; of a ring's hops the slowest counts."""
    tier, terms = route.slowest, protocol.inside if route.between is None else protocol.between
    start_s = tier.link.launch_s + protocol.start_s
    move = TransferTerm(1.0, terms.share * tier.pair_bytes_per_s)
    inside = between = 1.0
    if route.between is not None:
        between = protocol.between.share * route.between.pair_efficiency
    if route.inside is not None:
        inside = protocol.inside.share * route.inside.pair_efficiency
        if route.between is not None:
            inside = max(inside, move.bytes_per_s / route.inside.link.bytes_per_s)  # hops inside end with those between
    steps = ((1, terms.ring_step * tier.latency_s),)
    return CommAlgorithm(protocol.name, start_s, steps, (move,), Pattern.HOP, inside, between)


def _ring(protocol: Protocol, kind: CollectiveKind, route: Route) -> CommAlgorithm:
    laps, n, hops_between = LAPS[kind], route.num_ranks, route.num_nodes - 1
    inside, between = route.inside, route.between
    steps: tuple[tuple[int, float], ...] = ()
    rate = math.inf
    if inside is not None:
        step_s = protocol.inside.ring_step * inside.latency_s
        if between is not None:
            step_s = max(step_s, protocol.post_s)  # a step inside waits for the host to post the steps outside
        steps = ((laps * (n - 1 - hops_between), step_s),)
        rate = protocol.inside.share * inside.group_bytes_per_s
    if between is not None:
        # with one rank per node, latencies are fully exposed, as in a tree
        relative = protocol.between.tree_step if inside is None else protocol.between.ring_step
        steps = ((laps * hops_between, relative * between.latency_s), *steps)
        rate = min(rate, protocol.between.share * between.group_bytes_per_s)
    if kind is CollectiveKind.BROADCAST:
        move = TransferTerm(1.0, rate)
    else:
        move = TransferTerm(laps * (n - 1) / n, rate, "2 ({n}-1)/{n} x " if laps == 2 else "({n}-1)/{n} x ", n)
    start_s = route.slowest.link.launch_s + protocol.start_s
    efficiencies = _efficiencies(protocol, route)
    return CommAlgorithm(f"ring {protocol.name}", start_s, steps, (move,), Pattern.RING, *efficiencies)


def _tree(protocol: Protocol, route: Route) -> CommAlgorithm:
    steps: tuple[tuple[int, float], ...] = ()
    moves = []
    share = _TREE_SHARE if route.inside is None or route.between is None else _TREE_SHARE_BETWEEN_NODES
    if route.inside is not None:
        k = route.local
        steps = ((2 * (k - 1), protocol.inside.tree_step * route.inside.latency_s),)
        rate = protocol.inside.share * share * route.inside.group_bytes_per_s
        moves.append(TransferTerm(2 * (k - 1) / k, rate, "2 ({n}-1)/{n} x ", k))
    if route.between is not None:
        steps = (_tree_steps(route, route.between, protocol.between.tree_step), *steps)
        moves.append(_tree_move(route, route.between, protocol.between.share * share))
    start_s = route.slowest.link.launch_s + protocol.start_s
    efficiencies = _efficiencies(protocol, route, share)
    return CommAlgorithm(
        f"tree {protocol.name}", start_s, steps, (max(moves, key=_per_byte),), Pattern.TREE, *efficiencies
    )


def _efficiencies(protocol: Protocol, route: Route, share: float = 1.0) -> tuple[float, float]:
    """Returns the fractions of the datasheet bandwidth inside and between nodes while all ranks send; 1 for no link."""
    inside, between = route.inside, route.between
    return (
        1.0 if inside is None else share * protocol.inside.share * inside.device_efficiency,
        1.0 if between is None else share * protocol.between.share * between.device_efficiency,
    )


def _switch_can(kind: CollectiveKind, route: Route) -> bool:
    """Returns True if NVLS supports the collective; between nodes of few devices all_reduce continues as a tree."""
    if route.between is None:
        return kind is not CollectiveKind.BROADCAST
    return kind is CollectiveKind.ALL_REDUCE and route.local <= _MOST_OF_NVLS_TREE


def _nvls(kind: CollectiveKind, route: Route, inside: Tier, switch_share: float) -> CommAlgorithm:
    k, rate = route.local, inside.link.bytes_per_s * switch_share
    steps: tuple[tuple[int, float], ...] = ((1, NVLS_STEP_INSIDE * inside.latency_s),)
    is_reduced = kind is CollectiveKind.ALL_REDUCE
    moves = [TransferTerm(1 + 1 / k, rate, "(1 + 1/{n}) x ", k) if is_reduced else TransferTerm(1.0, rate)]
    if route.between is not None:
        steps = (_tree_steps(route, route.between, _NVLS_STEP_BETWEEN), *steps)
        moves.append(_tree_move(route, route.between, 1.0))
    name = "NVLS" if route.between is None else "NVLS tree"
    move, start_s = max(moves, key=_per_byte), route.slowest.link.launch_s
    between = 1.0 if route.between is None else route.between.device_efficiency
    fill = None if route.between is None else _nvls_fill(route, rate)
    return CommAlgorithm(name, start_s, steps, (move,), Pattern.NVLS, switch_share, between, fill=fill)


def _nvls_fill(route: Route, bytes_per_s: float) -> PipelineFill:
    """Returns the filling of an NVLS tree: a chunk is reduced in the node before it is sent, and multicast after that.

    All channels and heads have a chunk at once. Small messages and four nodes or more have smaller ones (NVIDIA/nccl at
    5067397c2676, src/enqueue.cc, calcCollChunking, and src/transport/nvls.cc, ncclNvlsTuning, of Hopper).
    """
    largest = _NVLS_CHUNKS[-1][0] if route.num_nodes < _NODES_WITH_SMALL_CHUNKS else _NVLS_SMALL_CHUNK
    at_once = _NVLS_CHANNELS * route.local
    chunks = [(at_once * size, times * at_once * size) for size, times in _NVLS_CHUNKS if size <= largest]
    sizes, least = zip(*chunks, strict=True)
    return PipelineFill(2, sizes, least, bytes_per_s)


def _tree_steps(route: Route, between: Tier, relative: float) -> tuple[int, float]:
    """Returns the number and seconds of a tree's steps between nodes, up and down."""
    return 2 * (route.num_nodes - 1).bit_length(), relative * between.latency_s


def _tree_move(route: Route, between: Tier, share: float) -> TransferTerm:
    """Returns the transfer of a tree over a node's network."""
    rate = share * between.group_bytes_per_s
    return TransferTerm(1.0, rate) if route.num_nodes == 2 else TransferTerm(2.0, rate, "2 x ")


def _pairwise(protocol: Protocol, communication: Communication, route: Route) -> CommAlgorithm:
    """Returns the all-to-all in which every rank sends one n-th to every other; of both tiers the slower one counts.

    Expert dispatch may send each token to a node once, and inside the node to all ranks with its experts.
    """
    n, k, nodes = route.num_ranks, route.local, route.num_nodes
    once = communication.draw if route.between is not None and route.inside is not None else None
    tiers: dict[str, tuple[int, Tier, Terms, TransferTerm]] = {}
    if route.inside is not None:
        rate = protocol.inside.share * route.inside.group_bytes_per_s
        move = TransferTerm((k - 1) / (n if once is None else k), rate, f"{k - 1}/{{n}} x ", n if once is None else k)
        tiers["inside"] = k - 1, route.inside, protocol.inside, move
    if route.between is not None:
        rate = protocol.between.share * route.between.pair_bytes_per_s
        if once is None:
            peers, move = n - k, TransferTerm((n - k) / n, rate, f"{n - k}/{{n}} x ", n)
        else:
            part = once.places(nodes) / once.places(n) * (nodes - 1) / nodes
            peers, move = nodes - 1, TransferTerm(part, rate, "{n} x ", part)
        tiers["between"] = peers, route.between, protocol.between, move
    ways = [
        CommAlgorithm(
            f"pairwise {protocol.name}" if once is None else f"once a node, {protocol.name}",
            tier.link.launch_s + protocol.start_s,
            ((1, terms.ring_step * tier.latency_s), (peers - 1, protocol.post_s)),
            (move,),
            Pattern.PAIRWISE if once is None else Pattern.ONCE_PER_NODE,
        )
        for peers, tier, terms, move in tiers.values()
    ]
    slower = max(ways, key=lambda way: way.seconds(communication.num_bytes))
    limit = _per_byte(slower.moves[0])

    def efficiency(name: str) -> float:
        """Transfers of the other tier end within the steps of the slower one."""
        if name not in tiers:
            return 1.0
        _, tier, _, move = tiers[name]
        return move.bytes_per_s / tier.link.bytes_per_s * max(1.0, _per_byte(move) / limit)

    return slower._replace(inside=efficiency("inside"), between=efficiency("between"))


def _per_byte(move: TransferTerm) -> float:
    return move.factor / move.bytes_per_s
