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
parameter_server 2 (k-1), 2 between nodes, and posting N - 2  2 (k-1)/k x B inside: a ring adds gradients first and
                 more in each of these                        gathers totals last; (N-1)/s x B on the network of each
                                                              of s nodes that serve, in push, and again in pull
================ ============================================ =====================================================

They are assumed to be written with NCCL's primitives: steps and bandwidths are those of its protocols, of which the
fastest counts. On gloo's links only the parameter server is modeled.

A parameter server has the network of all ranks of its node. It serves B/s bytes, or those of its parameters where they
are placed whole: the server with the most sets the time. It knows no buckets: every communication is assumed to have
the same fraction for each server as all gradients have, so that a step has the bytes of each server exactly.

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
from simplan.cost.communication.route import Route
from simplan.model.layer import CollectiveKind
from simplan.plan.collectives import Collectives
from simplan.program.program import Communication

_COLLNET_INSIDE, _COLLNET_BETWEEN = 1.18, 1.11  # steps relative to a ring's: 4.0 of 3.4 us on NVLink, 10.7 of 9.6


def prescribed_ways(
    name: str,
    collectives: Collectives,
    communication: Communication,
    route: Route,
    server_shares: tuple[float, ...] = (),
) -> list[CommAlgorithm]:
    """Returns an algorithm with each of its protocols, for a group that can run it (``simplan.rules.collectives``).

    Args:
        name: Algorithm that ``collectives`` prescribes for the communication.
        collectives, communication, route: As in ``communication_cost``.
        server_shares: Fraction of the gradients on each parameter server; empty for equal parts.
    """
    kind = communication.kind
    protocols = (NO_PROTOCOL,) if route.slowest.link.library == "gloo" else PROTOCOLS
    match name:
        case "parameter_server":
            shares = server_shares or (1 / collectives.num_servers,) * collectives.num_servers
            return [_parameter_server(protocol, shares, route) for protocol in protocols]
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


def _parameter_server(protocol: Protocol, server_shares: tuple[float, ...], route: Route) -> CommAlgorithm:
    """Returns a ring in each node around push and pull; the card of the server with the most bytes counts.

    A node without a server sends all bytes over its card in the push, which is never more: of N nodes, N - 1 or fewer
    serve then, and one of them at least 1 / (N - 1) of the bytes.
    """
    inside, between, k, nodes = route.inside, route.between, route.local, route.num_nodes
    steps, moves = [], []
    if inside is not None:
        steps.append((2 * (k - 1), protocol.inside.ring_step * inside.latency_s))
        rate = protocol.inside.share * inside.group_bytes_per_s
        moves.append(TransferTerm(2 * (k - 1) / k, rate, "2 ({n}-1)/{n} x ", k))
    if between is not None:
        largest = max(server_shares)
        rate = protocol.between.share * k * between.pair_bytes_per_s
        steps.append((2, protocol.between.ring_step * between.latency_s + (nodes - 2) * protocol.post_s))
        moves += 2 * [TransferTerm((nodes - 1) * largest, rate, f"{nodes - 1}/{{n}} x ", 1 / largest)]
    way = _named("parameter server", protocol, route, steps, moves, Pattern.PARAMETER_SERVER)
    return way._replace(server_shares=server_shares)


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
