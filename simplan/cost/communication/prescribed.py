"""Communication algorithms that run only where a plan prescribes them (``plan.collectives``).

With n ranks, k of them in each of N nodes, B bytes, and laps as in ``simplan.cost.communication.nccl``:

================ ============================================ =====================================================
algorithm        steps                                        bytes over a link
================ ============================================ =====================================================
halving_doubling laps x log2 k, laps x log2 N between nodes   laps x (k-1)/k x B inside, then laps x (N-1)/N x B/k
                                                              on the network: neighbors trade the largest parts
hierarchical     laps x (k-1), laps x (N-1) between nodes     the same: rings in the node, then rings of ranks with
                                                              the same place in N nodes
sharp            2 inside, one between nodes                  B/k to the switch and as much back, while ranks inside
                                                              reduce and gather: by NVLS, or 2 (k-1)/k x B
hierarchical     one in each phase, and posting k - 2 and     (k-1)/k x B inside, to the rank with the place of the
all_to_all       N - 2 more                                   destination; then (N-1)/N x B to ranks with that place
parameter_server 2, and posting n - 2 more in each            2 (n-k)/s x B on the network of each of s servers, or 2
                                                              (k-1)/s x B inside: push to all servers, then pull
================ ============================================ =====================================================

They are assumed to be written with NCCL's primitives: steps and bandwidths are those of its protocols, of which the
fastest counts. On gloo's links only the parameter server is modeled.

Sources: Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH" (halving and
doubling); Rabenseifner 2004 (the same with the nearest ranks first); Graham et al. 2020, doi
10.1007/978-3-030-50743-5_3 (SHARP), with latency relative to a ring's as in NVIDIA/nccl, src/graph/tuning.cc at
01afd20a77b5 (CollNet, Simple); Hwang et al. 2023, arXiv:2206.03382 (Tutel's two-level all-to-all); Li et al. 2014,
"Scaling distributed machine learning with the parameter server", and Jiang et al. 2020, "A unified architecture for
accelerating distributed DNN training" (bytes of servers that share machines with workers).
"""

from __future__ import annotations

from simplan.cost.communication.algorithm import CommAlgorithm, Pattern, TransferTerm
from simplan.cost.communication.nccl import LAPS, NO_PROTOCOL, NVLS_STEP_INSIDE, PROTOCOLS, Protocol
from simplan.cost.communication.route import Route, Tier
from simplan.model.layer import CollectiveKind
from simplan.plan.collectives import Collectives
from simplan.program.program import Communication

_COLLNET_INSIDE, _COLLNET_BETWEEN = 1.18, 1.11  # steps relative to a ring's: 4.0 of 3.4 us on NVLink, 10.7 of 9.6


def prescribed_ways(
    name: str, collectives: Collectives, communication: Communication, route: Route
) -> list[CommAlgorithm]:
    """Returns an algorithm with each of its protocols, for a group that can run it (``simplan.rules.collectives``)."""
    kind = communication.kind
    protocols = (NO_PROTOCOL,) if route.slowest.link.library == "gloo" else PROTOCOLS
    match name:
        case "parameter_server":
            return [_parameter_server(protocol, collectives.num_servers, route) for protocol in protocols]
        case "sharp":
            return [_sharp(route)]
        case "halving_doubling":
            return [_two_phases(protocol, kind, route, Pattern.HALVING_DOUBLING) for protocol in protocols]
        case "hierarchical" if kind is CollectiveKind.ALL_TO_ALL:
            return [_hierarchical_all_to_all(protocol, route) for protocol in protocols]
        case _:
            assert name == "hierarchical", name
            return [_two_phases(protocol, kind, route, Pattern.HIERARCHICAL) for protocol in protocols]


def _two_phases(protocol: Protocol, kind: CollectiveKind, route: Route, pattern: Pattern) -> CommAlgorithm:
    """Returns the algorithm that reduces inside nodes before it reduces between them, and gathers in reverse order."""
    laps, k, nodes = LAPS[kind], route.local, route.num_nodes
    by_doubling = pattern is Pattern.HALVING_DOUBLING
    times = "2 " if laps == 2 else ""
    steps, moves = [], []
    if route.inside is not None:
        number = k.bit_length() - 1 if by_doubling else k - 1
        steps.append((laps * number, protocol.inside.ring_step * route.inside.latency_s))
        rate = protocol.inside.share * route.inside.group_bytes_per_s
        moves.append(TransferTerm(laps * (k - 1) / k, rate, f"{times}({{n}}-1)/{{n}} x ", k))
    if route.between is not None:
        number = nodes.bit_length() - 1 if by_doubling else nodes - 1
        steps.append((laps * number, protocol.between.ring_step * route.between.latency_s))
        rate, text = protocol.between.share * route.between.pair_bytes_per_s, f"{times}({{n}}-1)/{{n}} x 1/{k} x "
        moves.append(TransferTerm(laps * (nodes - 1) / nodes / k, rate, text, nodes))
    return _named(pattern.value.replace("_", " "), protocol, route, steps, moves, pattern)


def _sharp(route: Route) -> CommAlgorithm:
    inside, between, k = route.inside, route.between, route.local
    assert between is not None, "checked by simplan.rules.collectives"
    assert between.link.switch_share is not None, "checked by simplan.rules.collectives"
    steps: list[tuple[int, float]] = [(1, _COLLNET_BETWEEN * between.latency_s)]
    moves = [TransferTerm(1.0, k * between.link.bytes_per_s * between.link.switch_share)]
    efficiency = 1.0
    if inside is not None and (efficiency := inside.link.switch_share or 0.0):
        steps.append((1, NVLS_STEP_INSIDE * inside.latency_s))
        moves.append(TransferTerm(1 + 1 / k, inside.link.bytes_per_s * efficiency, "(1 + 1/{n}) x ", k))
    elif inside is not None:
        steps.append((2, _COLLNET_INSIDE * inside.latency_s))
        moves.append(TransferTerm(2 * (k - 1) / k, inside.group_bytes_per_s, "2 ({n}-1)/{n} x ", k))
        efficiency = inside.device_efficiency
    move = max(moves, key=lambda move: move.factor / move.bytes_per_s)
    start_s = between.link.launch_s + PROTOCOLS[-1].start_s
    return CommAlgorithm("SHARP", start_s, tuple(steps), (move,), Pattern.SHARP, efficiency, between.link.switch_share)


def _hierarchical_all_to_all(protocol: Protocol, route: Route) -> CommAlgorithm:
    inside, between, k, nodes = route.inside, route.between, route.local, route.num_nodes
    assert inside is not None, "checked by simplan.rules.collectives"
    assert between is not None, "checked by simplan.rules.collectives"
    steps = [
        (1, protocol.inside.ring_step * inside.latency_s),
        (1, protocol.between.ring_step * between.latency_s),
        (k - 2 + nodes - 2, protocol.post_s),
    ]
    moves = [
        TransferTerm((k - 1) / k, protocol.inside.share * inside.group_bytes_per_s, "({n}-1)/{n} x ", k),
        TransferTerm((nodes - 1) / nodes, protocol.between.share * between.pair_bytes_per_s, "({n}-1)/{n} x ", nodes),
    ]
    return _named("hierarchical", protocol, route, steps, moves, Pattern.HIERARCHICAL_ALL_TO_ALL)


def _parameter_server(protocol: Protocol, num_servers: int, route: Route) -> CommAlgorithm:
    """Returns push and pull; the servers are spread over nodes, and the slower tier of a server counts."""
    n, k = route.num_ranks, route.local
    tiers: list[tuple[Tier, float, TransferTerm]] = []
    if route.inside is not None:
        rate = protocol.inside.share * route.inside.group_bytes_per_s
        move = TransferTerm(2 * (k - 1) / num_servers, rate, f"2 x {k - 1}/{{n}} x ", num_servers)
        tiers.append((route.inside, protocol.inside.ring_step, move))
    if route.between is not None:
        rate = protocol.between.share * route.between.pair_bytes_per_s
        move = TransferTerm(2 * (n - k) / num_servers, rate, f"2 x {n - k}/{{n}} x ", num_servers)
        tiers.append((route.between, protocol.between.ring_step, move))
    _, _, slowest = max(tiers, key=lambda tier: tier[2].factor / tier[2].bytes_per_s)
    step_s = max(relative * tier.latency_s for tier, relative, _ in tiers)
    steps = [(2, step_s), (2 * (n - 2), protocol.post_s)]
    return _named("parameter server", protocol, route, steps, [slowest], Pattern.PARAMETER_SERVER)._replace(
        num_servers=num_servers
    )


def _named(
    name: str,
    protocol: Protocol,
    route: Route,
    steps: list[tuple[int, float]],
    moves: list[TransferTerm],
    pattern: Pattern,
) -> CommAlgorithm:
    return CommAlgorithm(
        f"{name} {protocol.name}".strip(),
        route.slowest.link.launch_s + protocol.start_s,
        tuple(steps),
        tuple(moves),
        pattern,
        1.0 if route.inside is None else protocol.inside.share * route.inside.device_efficiency,
        1.0 if route.between is None else protocol.between.share * route.between.device_efficiency,
    )
