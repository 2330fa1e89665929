"""Communication algorithms on a torus of directly connected chips (TPU), as implemented by XLA.

A slice has the shape of the topology, or without one that of its size (``slice_shape``): 32 chips on two axes are 4x8.
A group has chips along some axes. Each axis has two links per chip, of bandwidth W per direction, if it is long enough
to close to a ring; otherwise one link counts. An irregular group of n chips counts as one of round(A log n / log S)
equal axes of the A of a slice of S chips. On equal axes, with B bytes:

============================ ===========================================================================
all_gather, reduce_scatter   B / (2 W axes), and half the way round each axis one hop after the other
all_reduce                   both of them
all_to_all                   on axes of s chips, where a part goes s/4 hops on average: s B / 4 / (2 W)
broadcast                    as an all_gather
ring, send                   one hop over one link
============================ ===========================================================================

Axes of different lengths have different loads: of an all-gather over a axes, an a-th of the buffer begins on each axis,
and in every round goes along the next one together with what came before. The axis with the longest time decides.

Source: jax-ml/scaling-book, sharding.md and tpus.md at 0819a7d8c55d. Slices are connected by another network. Traffic
between slices runs in a ring over the slices, every chip with its own part, before or after the part inside the slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from simplan.cluster.hardware import LinkSpec
from simplan.cost.communication.algorithm import CommAlgorithm, Pattern, TransferTerm
from simplan.cost.communication.nccl import LAPS
from simplan.cost.communication.route import Route, Tier
from simplan.model.layer import CollectiveKind
from simplan.program.program import Communication


def torus_way(communication: Communication, route: Route) -> CommAlgorithm:
    """Returns the algorithm over a torus, for communication among two or more ranks."""
    kind = communication.kind
    inside, between = 1.0, 1.0 if route.between is None else route.between.pair_efficiency
    if route.inside is not None:
        inside = route.inside.link.bandwidth_share
    if kind in (CollectiveKind.SEND, CollectiveKind.RING):
        tier = route.slowest
        move = TransferTerm(1.0, tier.pair_bytes_per_s)
        if route.inside is not None and route.between is not None:
            inside = max(inside, move.bytes_per_s / route.inside.link.bytes_per_s)  # as hops of NCCL
        return CommAlgorithm("hop", 0.0, ((1, tier.latency_s),), (move,), Pattern.HOP, inside, between)
    tiers = []
    if route.inside is not None:
        tiers.append(_inside(kind, route, route.inside.link))
    if route.between is not None:
        tiers.append(_between(kind, route, route.between))
    name = "ring" if route.inside is None else "torus"
    steps, moves = tuple(step for step, _ in tiers), tuple(move for _, move in tiers)
    return CommAlgorithm(name, 0.0, steps, moves, Pattern.TORUS, inside, between)


def _inside(kind: CollectiveKind, route: Route, link: LinkSpec) -> tuple[tuple[int, float], TransferTerm]:
    """Returns step and transfer for the ranks of one slice."""
    n = route.local
    axes = max(1, round((link.torus_axes or 1) * math.log(n) / math.log(route.devices_per_slice)))
    side = n ** (1 / axes)
    closes = round(side) >= (link.torus_wrap or 1)
    if route.axes and route.axes != ((round(side), closes),) * axes:
        return _on_unequal_axes(kind, route.axes, link)
    rate = link.bytes_per_s * link.bandwidth_share * (2 if closes else 1)
    hops = max(1, math.ceil(axes * (side / 2 if closes else side - 1)))
    if kind is CollectiveKind.ALL_TO_ALL:
        return (hops, link.latency_s), TransferTerm(side / 4, rate, "{n} / 4 x ", side)
    laps = LAPS[kind]
    text = "2 ({n}-1)/{n} x " if laps == 2 else "({n}-1)/{n} x "
    return (laps * hops, link.latency_s), TransferTerm(laps * (n - 1) / n, axes * rate, text, n)


def _on_unequal_axes(
    kind: CollectiveKind, axes: Sequence[tuple[int, bool]], link: LinkSpec
) -> tuple[tuple[int, float], TransferTerm]:
    """Returns step and transfer on axes of different lengths, or of which only some close to rings."""
    num_ranks, bytes_per_s = math.prod(side for side, _ in axes), link.bytes_per_s * link.bandwidth_share
    hops = max(1, sum(math.ceil(side / 2) if closes else side - 1 for side, closes in axes))
    if kind is CollectiveKind.ALL_TO_ALL:
        factor = max(side / 4 / (2 if closes else 1) for side, closes in axes)
        return (hops, link.latency_s), TransferTerm(factor, bytes_per_s, "{n} x ", factor)
    factor, laps = 0.0, LAPS[kind]
    for index, (side, closes) in enumerate(axes):
        before = sum(
            math.prod(axes[each % len(axes)][0] for each in range(first, first + (index - first) % len(axes)))
            for first in range(len(axes))
        )
        gathered = before * (side - 1) / num_ranks / len(axes)
        factor = max(factor, laps * gathered / (2 if closes else 1))
    return (laps * hops, link.latency_s), TransferTerm(factor, bytes_per_s, "{n} x ", factor)


def _between(kind: CollectiveKind, route: Route, tier: Tier) -> tuple[tuple[int, float], TransferTerm]:
    """Returns step and transfer between slices: every chip sends its part of the buffer over its own network."""
    nodes, k = route.num_nodes, 1 if kind is CollectiveKind.ALL_TO_ALL else route.local
    laps = LAPS.get(kind, 1)
    text = f"{'2 ' if laps == 2 else ''}({{n}}-1)/{{n}} x 1/{k} x "
    move = TransferTerm(laps * (nodes - 1) / nodes / k, tier.pair_bytes_per_s, text, nodes)
    return (laps * (nodes - 1), tier.latency_s), move
