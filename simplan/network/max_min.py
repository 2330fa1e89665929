"""Max-min fair sharing of links, compiled with numba.

A running communication transfers on several links with one common progress: at progress rate r it keeps link l busy for
the share r x seconds of the time. Rates rise together, per connection, until a link is full or the communication is as
fast as it is alone; what is frozen leaves the rest to the others (progressive filling: Bertsekas and Gallager, Data
Networks, 2nd edition, section 6.5.2). Rates are unique: every communication is as fast as alone, or crosses a full link
on which no other has more per connection.

A change reaches the communications that share links with it, directly or through others. Lists of the communications on
each link find them, and a tree of the ends finds the next one, so the cost of a change depends on their number and only
as a logarithm on the size of the cluster. All functions are in one module because numba's cache notices changes of one
file only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simplan.jit import jit

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_EQUAL = 1e-12  # relative difference below which two levels are equal
TOGETHER = 1e-14
"""Relative difference of times below which transfers end together: rounding separates equal ones."""


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


class Paths(NamedTuple):
    """Links of every usage; never written to.

    Attributes:
        first, link, seconds, weights, limits: As for ``fair_rates``.
        owner: ``(num_entries,)`` Usage of each entry of ``link``.
    """

    first: Ints
    link: Ints
    seconds: Floats
    weights: Floats
    limits: Floats
    owner: Ints

    @classmethod
    def of(cls, first: Ints, link: Ints, seconds: Floats, connections: Floats, transfer_s: Floats) -> Paths:
        """Links of usages, of which a communication that runs alone takes ``transfer_s``, ``(num_usages,)`` seconds."""
        with np.errstate(divide="ignore"):
            limits = 1.0 / transfer_s
        owner = np.repeat(np.arange(len(first) - 1, dtype=np.int32), np.diff(first))
        return cls(first, link, seconds, weights_of(first, seconds, connections), limits, owner)


class Running(NamedTuple):
    """Running communications, one per slot; the number of slots is a power of 2. Free slots end at infinity.

    Attributes:
        op, usage: ``(num_slots,)`` Operation and usage.
        scale: Seconds alone over those of the usage: an uncertain or slow operation takes longer.
        left, rate: Fraction left at ``updated_s``, and progress since then, 1/s.
        updated_s: Time of the last change of the rate.
        end_s: ``(2 * num_slots,)`` Entry ``num_slots + slot`` is the end of a slot if its rate does not change again.
            Entry ``k`` below is the earlier of entries ``2 * k`` and ``2 * k + 1``, so entry 1 is the earliest of all.
        bottleneck: Link that limits the rate; -1 if the communication is as fast as alone.
        next_slot: Next slot of the same usage; -1 for none.
    """

    op: Ints
    usage: Ints
    scale: Floats
    left: Floats
    rate: Floats
    updated_s: Floats
    end_s: Floats
    bottleneck: Ints
    next_slot: Ints

    @classmethod
    def empty(cls, size: int) -> Running:
        """Free slots."""
        op, usage, bottleneck, next_slot = (np.full(size, -1, np.int32) for _ in range(4))
        scale, left, rate, updated_s = (np.zeros(size) for _ in range(4))
        return cls(op, usage, scale, left, rate, updated_s, np.full(2 * size, np.inf), bottleneck, next_slot)

    def doubled(self) -> Running:
        """Returns the communications with as many free slots behind them."""
        size = len(self.op)
        levels = [np.concatenate([self.end_s[size:], np.full(size, np.inf)])]
        while len(levels[-1]) > 1:
            levels.append(np.minimum(levels[-1][::2], levels[-1][1::2]))
        joined = Running._make(_joined(self, Running.empty(size)))
        return joined._replace(end_s=np.concatenate([[np.inf], *reversed(levels)]))


class LinkLists(NamedTuple):
    """Running communications on each link, and the links on which communications began or ended.

    Attributes:
        entry: ``(num_links,)`` First entry of ``Paths.link`` on each link whose usage runs; -1 for none.
        next_entry, previous_entry: ``(num_entries,)`` The other entries of the list; -1 for none.
        slot: ``(num_usages,)`` First slot of each usage; -1 if it does not run.
        changed: ``(num_links,)`` Changed links, each once.
        num_changed: ``(1,)`` Number of changed links.
        is_changed: ``(num_links,)`` True for changed links.
        is_reached: ``(num_usages,)`` Working memory, False between calls.
        scratch: ``(4, num_links)`` Working memory.
    """

    entry: Ints
    next_entry: Ints
    previous_entry: Ints
    slot: Ints
    changed: Ints
    num_changed: Ints
    is_changed: Bools
    is_reached: Bools
    scratch: Floats

    @classmethod
    def empty(cls, num_links: int, paths: Paths) -> LinkLists:
        """Lists of links on which nothing runs."""
        num_entries, num_usages = len(paths.link), len(paths.weights)
        entry, following, previous, slot, changed = (
            np.full(size, -1, np.int32) for size in (num_links, num_entries, num_entries, num_usages, num_links)
        )
        is_changed, is_reached = np.zeros(num_links, np.bool_), np.zeros(num_usages, np.bool_)
        num_changed = np.zeros(1, np.int32)
        return cls(
            entry, following, previous, slot, changed, num_changed, is_changed, is_reached, np.zeros((4, num_links))
        )


class Segments(NamedTuple):
    """Intervals in which a communication transfers at a constant rate.

    Attributes:
        op: ``(num_segments,)`` Operation, or leader of the meeting; constant flows follow the operations, and then the
            communications of other jobs.
        usage: ``(num_segments,)`` Its usage.
        start_s, end_s: ``(num_segments,)`` Seconds from the start of the step.
        rate: ``(num_segments,)`` Progress per second, where the transfer alone takes ``LinkUse.transfer_s``.
        bottleneck: ``(num_segments,)`` Link that limits the rate; -1 if the communication is as fast as alone.
    """

    op: Ints
    usage: Ints
    start_s: Floats
    end_s: Floats
    rate: Floats
    bottleneck: Ints

    @classmethod
    def empty(cls, size: int) -> Segments:
        """Room for some intervals."""
        start_s, end_s, rate = (np.zeros(size) for _ in range(3))
        op, usage, bottleneck = (np.zeros(size, np.int32) for _ in range(3))
        return cls(op, usage, start_s, end_s, rate, bottleneck)

    def since(self, begin_s: float) -> Segments:
        """Returns the intervals after a time, in seconds from it."""
        kept = self.end_s > begin_s
        starts_s, ends_s = np.maximum(self.start_s[kept], begin_s) - begin_s, self.end_s[kept] - begin_s
        rate, bottleneck = self.rate[kept], self.bottleneck[kept]
        return Segments(self.op[kept], self.usage[kept], starts_s, ends_s, rate, bottleneck)

    def doubled(self) -> Segments:
        """Returns the intervals with room for as many behind them."""
        return Segments._make(_joined(self, Segments.empty(len(self.op))))


def _joined(first: Iterable[Any], second: Iterable[Any]) -> Iterator[npt.NDArray[Any]]:
    """Arrays of two tuples, pair by pair one behind the other."""
    return (np.concatenate(pair) for pair in zip(first, second, strict=True))


@jit
def mark(lists: LinkLists, link: int) -> None:
    """Notes that a link has changed."""
    if not lists.is_changed[link]:
        lists.is_changed[link] = True
        lists.changed[lists.num_changed[0]] = link
        lists.num_changed[0] += 1


@jit
def _add(paths: Paths, running: Running, lists: LinkLists, slot: int) -> None:
    """Adds the communication of a slot to the lists of its links, which it changes."""
    usage = running.usage[slot]
    is_first = lists.slot[usage] < 0
    running.next_slot[slot] = lists.slot[usage]
    lists.slot[usage] = slot
    for entry in range(paths.first[usage], paths.first[usage + 1]):
        link = paths.link[entry]
        mark(lists, link)
        if is_first:
            following = lists.entry[link]
            lists.next_entry[entry], lists.previous_entry[entry] = following, -1
            if following >= 0:
                lists.previous_entry[following] = entry
            lists.entry[link] = entry


@jit
def _remove(paths: Paths, running: Running, lists: LinkLists, slot: int) -> None:
    """Removes the communication of a slot from the lists of its links, which it changes."""
    usage = running.usage[slot]
    if lists.slot[usage] == slot:
        lists.slot[usage] = running.next_slot[slot]
    else:
        before = lists.slot[usage]
        while running.next_slot[before] != slot:
            before = running.next_slot[before]
        running.next_slot[before] = running.next_slot[slot]
    is_last = lists.slot[usage] < 0
    for entry in range(paths.first[usage], paths.first[usage + 1]):
        link = paths.link[entry]
        mark(lists, link)
        if is_last:
            following, before = lists.next_entry[entry], lists.previous_entry[entry]
            if before < 0:
                lists.entry[link] = following
            else:
                lists.next_entry[before] = following
            if following >= 0:
                lists.previous_entry[following] = before


@jit
def advance(running: Running, slots: Ints, now_s: float, segments: Segments, num_segments: int) -> int:
    """Subtracts the progress since the last change, and records it.

    Returns:
        Number of segments, which grows by at most ``len(slots)``.
    """
    for slot in slots:
        start_s, rate = running.updated_s[slot], running.rate[slot]
        running.left[slot] -= rate * (now_s - start_s)
        running.updated_s[slot] = now_s
        if rate > 0 and now_s > start_s:
            segments.op[num_segments], segments.usage[num_segments] = running.op[slot], running.usage[slot]
            segments.bottleneck[num_segments] = running.bottleneck[slot]
            segments.start_s[num_segments], segments.end_s[num_segments] = start_s, now_s
            segments.rate[num_segments] = rate * running.scale[slot]
            num_segments += 1
    return num_segments


@jit
def _set_end(running: Running, slot: int, end_s: float) -> None:
    """Sets the end of a slot, and the entries above it that change."""
    ends_s = running.end_s
    at = len(running.op) + slot
    ends_s[at] = end_s
    while at > 1:
        at //= 2
        earlier_s = min(ends_s[2 * at], ends_s[2 * at + 1])
        if ends_s[at] == earlier_s:
            return
        ends_s[at] = earlier_s


@jit
def _next_slots(running: Running) -> Ints:
    """Returns the slots that end first, and together, ascending; none if nothing ends."""
    ends_s, size = running.end_s, len(running.op)
    slots = [np.int32(0) for _ in range(0)]
    if ends_s[1] == np.inf:
        return np.array(slots, np.int32)
    until_s = ends_s[1] * (1.0 + TOGETHER)
    entries = [1]
    while len(entries):
        at = entries.pop()
        if ends_s[at] > until_s:
            continue
        if at >= size:
            slots.append(np.int32(at - size))
        else:
            entries.append(2 * at + 1)
            entries.append(2 * at)
    return np.array(slots, np.int32)


@jit
def _reached_slots(paths: Paths, running: Running, lists: LinkLists) -> Ints:
    """Returns the slots that the changes reach through shared links, and forgets the changes."""
    slots, done = [np.int32(0) for _ in range(0)], 0
    usages = [np.int32(0) for _ in range(0)]
    while done < lists.num_changed[0]:
        at = lists.entry[lists.changed[done]]
        done += 1
        while at >= 0:
            usage = paths.owner[at]
            at = lists.next_entry[at]
            if lists.is_reached[usage]:
                continue
            lists.is_reached[usage] = True
            usages.append(usage)
            for entry in range(paths.first[usage], paths.first[usage + 1]):
                mark(lists, paths.link[entry])
            slot = lists.slot[usage]
            while slot >= 0:
                slots.append(slot)
                slot = running.next_slot[slot]
    for usage in usages:
        lists.is_reached[usage] = False
    for k in range(done):
        lists.is_changed[lists.changed[k]] = False
    lists.num_changed[0] = 0
    return np.array(slots, np.int32)


@jit
def settle(
    paths: Paths,
    running: Running,
    lists: LinkLists,
    capacity: Floats,
    ended: Ints,
    begun: Ints,
    now_s: float,
    segments: Segments,
    num_segments: int,
) -> tuple[int, float, Ints]:
    """Ends and begins communications, and gives new rates to those that the changes reach.

    All in one call, since a call with so many arrays takes longer than most of the changes.

    Args:
        paths, running, lists: Communications.
        capacity: ``(num_links,)`` Fraction of its bandwidth that each link has now, above 0.
        ended: Slots whose communications end now, and which become free.
        begun: Slots whose communications begin now, with ``op``, ``usage``, ``scale`` and ``left``.
        now_s: Time.
        segments: Receives the intervals that end now; with room for one of each slot.
        num_segments: Number of segments recorded before.

    Returns:
        Number of segments; the time of the next end, infinite for none; the slots that then end together.
    """
    num_segments = advance(running, ended, now_s, segments, num_segments)
    for slot in ended:
        _remove(paths, running, lists, slot)
        _set_end(running, slot, np.inf)
    for slot in begun:
        running.rate[slot], running.updated_s[slot] = 0.0, now_s
        _add(paths, running, lists, slot)
    slots = _reached_slots(paths, running, lists)
    num_segments = advance(running, slots, now_s, segments, num_segments)
    rates, bottleneck = fair_rates(
        paths.first,
        paths.link,
        paths.seconds,
        paths.weights,
        paths.limits,
        capacity,
        running.usage[slots],
        lists.scratch,
    )
    for k, slot in enumerate(slots):
        running.bottleneck[slot] = bottleneck[k]
        running.rate[slot] = rates[k] / running.scale[slot]
        _set_end(running, slot, now_s + running.left[slot] / running.rate[slot])
    return num_segments, running.end_s[1], _next_slots(running)
