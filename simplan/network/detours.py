"""Adaptive routing with detours: traffic that would overload the minimal path also takes other paths.

A router of a dragonfly chooses by load between the minimal path of a packet and detours over another router or group
(UGAL: Kim, Dally, Scott, Abts, "Technology-driven, highly-scalable dragonfly topology", ISCA 2008; Slingshot: De Sensi
et al., "An in-depth analysis of the Slingshot interconnect", arXiv 2008.08886). In a fluid, such routers even out the
load: an overloaded link sends traffic on detours until it is not full any more, or as busy as they are.

The split of each link is chosen once per step, for the traffic that could cross the fabric at the same time: every rank
and stream runs its largest communication. A flow takes at most one detour in place of each link of its minimal path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simplan.jit import jit
from simplan.network.fabric import FabricLink
from simplan.network.usage import LinkUsage

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

_MAX_SWEEPS = 64
_SETTLED = 1e-6
"""Largest change of a busy share in a sweep over all links after which splits stay."""


class DetourShares(NamedTuple):
    """Detours of one link, and the traffic that takes each.

    Attributes:
        legs: ``(num_detours, num_legs)`` Links of each detour; -1 behind the last one.
        slowness: ``(num_detours, num_legs)`` Busy seconds of each leg per second of the link; 0 behind the last leg.
        shares: ``(num_detours,)`` Share of the link's traffic that takes each detour.
    """

    legs: Ints
    slowness: Floats
    shares: Floats


def splits_of(
    load: Floats, links: Sequence[FabricLink], detours: Callable[[int], Sequence[tuple[int, ...]]]
) -> dict[int, DetourShares]:
    """Returns the splits of all links of which some traffic takes detours.

    Args:
        load: ``(num_links,)`` Busy share of each link if all traffic takes its minimal path; above 1 for an overload.
        links: Links of the fabric.
        detours: Function from a link to the paths that lead from one end to the other; none for a link without.
    """
    now, splits = load.copy(), dict[int, DetourShares]()
    has_split = np.zeros(len(load), np.bool_)
    for _ in range(_MAX_SWEEPS):
        changed = 0.0
        for link in np.flatnonzero((load > 0) & (has_split | (now > 1))).tolist():
            if not has_split[link]:
                splits[link], has_split[link] = _unused(link, links, detours(link)), True
            legs, slowness, shares = splits[link]
            changed = max(changed, divert(now, link, float(load[link]), legs, slowness, shares))
        if changed <= _SETTLED:
            break
    return {link: split for link, split in splits.items() if split.shares.any()}


def _unused(link: int, links: Sequence[FabricLink], detours: Sequence[tuple[int, ...]]) -> DetourShares:
    """Detours of a link without traffic."""
    legs = np.full((len(detours), max(map(len, detours), default=0)), -1, np.int32)
    slowness = np.zeros(legs.shape)
    for row, detour in enumerate(detours):
        legs[row, : len(detour)] = detour
        slowness[row, : len(detour)] = [links[link].bytes_per_s / links[leg].bytes_per_s for leg in detour]
    return DetourShares(legs, slowness, np.zeros(len(detours)))


@jit
def _room(load: Floats, legs: Ints, slowness: Floats, level: float, row: int) -> float:
    """Returns the busy share of a link that a detour can take until one of its legs is as busy as ``level``."""
    room = np.inf
    for place in range(legs.shape[1]):
        if legs[row, place] >= 0:
            room = min(room, (level - load[legs[row, place]]) / slowness[row, place])
    return max(room, 0.0)


@jit
def _level(load: Floats, legs: Ints, slowness: Floats, busy: float, wanted: float) -> float:
    """Returns the busy share up to which detours are filled, by bisection.

    Args:
        busy: Busy share of the link without detours, above that of the result.
        wanted: Busy share that the detours are to take; negative to even out the link and its detours.
    """
    low, high = 0.0, busy
    for _ in range(60):
        level = 0.5 * (low + high)
        taken = 0.0
        for row in range(len(legs)):
            taken += _room(load, legs, slowness, level, row)
        if (taken >= wanted) if wanted >= 0 else (busy - taken <= level):
            high = level
        else:
            low = level
    return high


@jit
def divert(load: Floats, link: int, own_share: float, legs: Ints, slowness: Floats, shares: Floats) -> float:
    """Sets the shares of a link's own traffic that take its detours, given the load of all others.

    Args:
        load: ``(num_links,)`` Busy share of each link; updated.
        link: The link.
        own_share: Busy share of the link by traffic on its minimal path; the rest are detours of others.
        legs, slowness, shares: See ``DetourShares``; shares are updated.

    Returns:
        Largest change of the busy share of the link or a leg.
    """
    before = shares.copy()
    for row in range(len(legs)):
        for place in range(legs.shape[1]):
            if legs[row, place] >= 0:
                load[legs[row, place]] -= own_share * shares[row] * slowness[row, place]
        load[link] += own_share * shares[row]
    busy = load[link]
    even = _level(load, legs, slowness, busy, -1.0)
    wanted = min(own_share, busy - max(1.0, even))
    total = 0.0
    if wanted > 0.0:
        level = _level(load, legs, slowness, busy, wanted)
        for row in range(len(legs)):
            shares[row] = _room(load, legs, slowness, level, row)
            total += shares[row]
    changed = 0.0
    for row in range(len(legs)):
        shares[row] = shares[row] / total * min(wanted, total) / own_share if total > 0.0 else 0.0
        load[link] -= own_share * shares[row]
        for place in range(legs.shape[1]):
            if legs[row, place] >= 0:
                load[legs[row, place]] += own_share * shares[row] * slowness[row, place]
                changed = max(changed, own_share * abs(shares[row] - before[row]) * slowness[row, place])
    return changed


def on_detours(usage: LinkUsage, splits: dict[int, DetourShares]) -> LinkUsage:
    """Returns a usage of minimal paths with its part of the traffic on detours."""
    places = [place for place, link in enumerate(usage.links.tolist()) if link in splits]
    if not places:
        return usage
    kept = np.ones(len(usage.links))
    links, rows = [usage.links], []
    for place in places:
        split = splits[int(usage.links[place])]
        kept[place] = max(0.0, 1.0 - float(split.shares.sum()))
        row, leg = np.nonzero((split.legs >= 0) & (split.shares > 0)[:, None])
        links.append(split.legs[row, leg])
        share = split.shares[row]
        rows.append((usage.seconds[place] * share * split.slowness[row, leg], usage.connections[place] * share,
                     usage.num_bytes[place] * share))  # fmt: skip
    here = (usage.seconds, usage.connections, usage.num_bytes)
    all_links, where = np.unique(np.concatenate(links), return_inverse=True)
    seconds, connections, num_bytes = (
        np.bincount(where, np.concatenate([direct_share * kept, *parts]), len(all_links)).astype(np.float64)
        for direct_share, parts in zip(here, zip(*rows, strict=True), strict=True)
    )
    used = connections > 0
    return usage._replace(
        links=all_links[used].astype(np.int32),
        seconds=seconds[used],
        connections=connections[used],
        num_bytes=num_bytes[used],
    )
