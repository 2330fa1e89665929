"""Max-min fair sharing of links, compiled with numba.

A running communication transfers on several links with one common progress: at progress rate r it keeps link l busy for
the share r x seconds of the time. Rates rise together, per connection, until a link is full or the communication is as
fast as it is alone; what is frozen leaves the rest to the others (progressive filling: Bertsekas and Gallager, Data
Networks, 2nd edition, section 6.5.2). Rates are unique: every communication is as fast as alone, or crosses a full link
on which no other has more per connection.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplan.jit import jit

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_EQUAL = 1e-12  # relative difference below which two levels are equal


@jit
def weights_of(first: Ints, seconds: Floats, connections: Floats) -> Floats:
    """Returns the progress rate of each usage at one full link per connection, ``(num_usages,)``; 1/s.

    Args:
        first: ``(num_usages + 1,)`` Offsets of each usage into the other arrays.
        seconds: Busy seconds of the links of each usage, above 0.
        connections: Connections of each usage on these links, above 0.
    """
    weights = np.full(len(first) - 1, np.inf)
    for usage in range(len(weights)):
        for entry in range(first[usage], first[usage + 1]):
            weights[usage] = min(weights[usage], connections[entry] / seconds[entry])
    return weights


@jit
def fair_rates(
    first: Ints,
    link: Ints,
    seconds: Floats,
    weights: Floats,
    limits: Floats,
    capacity: Floats,
    usages: Ints,
    scratch: Floats,
) -> tuple[Floats, Ints]:
    """Returns the rates of communications that run at the same time, and the link that limits each.

    All links that are the bottleneck of all their communications are filled in one pass, so the number of passes is the
    depth of dependence between bottlenecks, not the number of links.

    Args:
        first: ``(num_usages + 1,)`` Offsets of each usage into ``link`` and ``seconds``.
        link: Links of each usage, each once.
        seconds: Busy seconds of these links, above 0.
        weights: ``(num_usages,)`` See ``weights_of``.
        limits: ``(num_usages,)`` Progress rates of communications that run alone, 1/s.
        capacity: ``(num_links,)`` Fraction of its bandwidth that each link has now, above 0.
        usages: ``(num_running,)`` Usage of each running communication.
        scratch: ``(4, num_links)`` Working memory.

    Returns:
        ``(num_running,)`` Progress rates in 1/s, and limiting links; -1 for a communication as fast as alone.
    """
    num = len(usages)
    rates, bottleneck = np.zeros(num), np.full(num, -1, np.int32)
    free, least = scratch[0], scratch[3]
    lowest, where = np.empty(num), np.empty(num, np.int32)
    rising = np.arange(num)
    for c in range(num):
        for entry in range(first[usages[c]], first[usages[c] + 1]):
            free[link[entry]] = capacity[link[entry]]
    while len(rising):
        _set_levels(first, link, seconds, weights, usages[rising], scratch)
        _set_lowest(first, link, weights, limits, usages[rising], scratch, lowest, where)
        kept = 0
        for k in range(len(rising)):
            c, usage, one = rising[k], usages[rising[k]], where[k]
            if one >= 0 and least[one] < scratch[2, one] * (1.0 - _EQUAL):
                rising[kept] = c
                kept += 1
                continue
            rates[c] = limits[usage] if one < 0 else weights[usage] * lowest[k]
            bottleneck[c] = one
            for entry in range(first[usage], first[usage + 1]):
                free[link[entry]] -= rates[c] * seconds[entry]
        rising = rising[:kept]
    return rates, bottleneck


@jit
def _set_levels(first: Ints, link: Ints, seconds: Floats, weights: Floats, usages: Ints, scratch: Floats) -> None:
    """Sets the level at which each link is full, if the communications that still rise rise to it together."""
    free, demand, level, least = scratch[0], scratch[1], scratch[2], scratch[3]
    for usage in usages:
        for entry in range(first[usage], first[usage + 1]):
            demand[link[entry]] = 0.0
    for usage in usages:
        for entry in range(first[usage], first[usage + 1]):
            demand[link[entry]] += weights[usage] * seconds[entry]
    for usage in usages:
        for entry in range(first[usage], first[usage + 1]):
            level[link[entry]] = max(free[link[entry]], 0.0) / demand[link[entry]]
            least[link[entry]] = np.inf


@jit
def _set_lowest(
    first: Ints, link: Ints, weights: Floats, limits: Floats, usages: Ints, scratch: Floats, lowest: Floats, where: Ints
) -> None:
    """Sets the lowest level of each communication with its link, and the least of these on each link."""
    level, least = scratch[2], scratch[3]
    for k in range(len(usages)):
        usage = usages[k]
        lowest[k], where[k] = np.inf, -1
        for entry in range(first[usage], first[usage + 1]):
            if level[link[entry]] < lowest[k]:
                lowest[k], where[k] = level[link[entry]], link[entry]
        if limits[usage] <= weights[usage] * lowest[k]:
            lowest[k], where[k] = limits[usage] / weights[usage], -1
        for entry in range(first[usage], first[usage + 1]):
            least[link[entry]] = min(least[link[entry]], lowest[k])


@jit
def connected(first: Ints, link: Ints, usages: Ints, is_changed: Bools) -> Ints:
    """Returns the positions of the communications that a change on some links may reach through shared links.

    Args:
        first, link, usages: As for ``fair_rates``.
        is_changed: ``(num_links,)`` True for links on which a communication began or ended; written to: True for all
            links of the returned communications.
    """
    num = len(usages)
    is_reached = np.zeros(num, np.bool_)
    grows = True
    while grows:
        grows = False
        for c in range(num):
            if is_reached[c]:
                continue
            begin, end = first[usages[c]], first[usages[c] + 1]
            for entry in range(begin, end):
                if is_changed[link[entry]]:
                    is_reached[c] = True
                    break
            if is_reached[c]:
                grows = True
                for entry in range(begin, end):
                    is_changed[link[entry]] = True
    return np.flatnonzero(is_reached).astype(np.int32)
