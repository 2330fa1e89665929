"""Max-min fair sharing of links, compiled with numba.

A running communication, or a flow with a rate of its own, transfers on several links with one common progress: at
progress rate r it keeps link l busy for the share r x seconds of the time. A full link gives every connection on it the
same share of its time, and the rest of what a communication does not take, because another link or its own speed limits
it, to the others (progressive filling: Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2). So every
communication is as fast as alone, or crosses a full link on which no other has more per connection: bottleneck max
fairness (Bonald and Roberts, Multi-resource fairness: objectives, algorithms and performance, SIGMETRICS 2015). A rate
depends on nothing but the communications that run.

If all connections of a communication have equal bytes, as in a transfer from one device to another, this is max-min
fair in bytes per second. Where communications limit each other in a circle, each on a link that is not the bottleneck
of all on it, those on the link with the least share per connection get it, and what then is left on all of their links.

A change reaches the communications that share links with it, directly or through others. Lists of the communications on
each link find them, and a tree of the ends finds the next one, so the cost of a change depends on their number and only
as a logarithm on the size of the cluster.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplan.jit import jit, jit_uncounted
from simplan.network.running import Flaps, Floats, Ints, LinkLists, Paths, Running, Segments, StepOps, StepState

_EQUAL = 1e-12  # relative difference below which two levels are equal
_MAX_ROUNDS = 16
"""Rounds in which communications that limit each other in a circle share what is left."""
TOGETHER = 1e-14
"""Relative difference of times below which transfers end together: rounding separates equal ones."""


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
        weights: See ``weights_of``.
        limits: ``(num_usages,)`` Progress rates of communications that run alone, 1/s.
        capacity: ``(num_links,)`` Fraction of its bandwidth that each link has now, above 0.
        usages: ``(num_running,)`` Usage of each running communication.
        scratch: ``(4, num_links)`` Working memory.

    Returns:
        ``(num_running,)`` Progress rates in 1/s, and limiting links; -1 for a communication as fast as alone.
    """
    num = len(usages)
    rates, bottleneck = np.zeros(num), np.full(num, -1, np.int32)
    free = scratch[0]
    early, num_early = np.empty(num, np.int64), 0  # limited in a circle
    for c in range(num):
        for entry in range(first[usages[c]], first[usages[c] + 1]):
            free[link[entry]] = capacity[link[entry]]
    rising = np.arange(num)
    for _ in range(_MAX_ROUNDS):
        num_early = _fill(first, link, seconds, weights, limits, usages, rising, rates, bottleneck, scratch, early)
        rising = early[:num_early].copy()
        if not num_early:
            break
    return rates, bottleneck


@jit
def _fill(
    first: Ints,
    link: Ints,
    seconds: Floats,
    weights: Floats,
    limits: Floats,
    usages: Ints,
    rising: npt.NDArray[np.int64],
    rates: Floats,
    bottleneck: Ints,
    scratch: Floats,
    early: npt.NDArray[np.int64],
) -> int:
    """Raises rates until each is limited.

    Args:
        first, link, seconds, weights, limits, usages, scratch: See ``fair_rates``; ``scratch`` has the free share of
            each link.
        rising: Communications whose rates rise, from what they have.
        rates, bottleneck: Of all communications; those of ``rising`` change.
        early: Receives communications that were limited in a circle and may still rise.

    Returns:
        Number of these.
    """
    free, level, least = scratch[0], scratch[2], scratch[3]
    lowest, where = np.empty(len(rising)), np.empty(len(rising), np.int32)
    num_early = 0
    while len(rising):
        _set_levels(first, link, seconds, weights, usages[rising], scratch)
        _set_lowest(first, link, weights, limits, usages[rising], rates[rising], scratch, lowest, where)
        circle = True
        low = np.inf
        for k in range(len(rising)):
            if where[k] < 0 or least[where[k]] >= 1.0 - _EQUAL:
                circle = False
                break
            low = min(low, level[where[k]])
        kept = 0
        for k in range(len(rising)):
            c, member = rising[k], where[k]
            if circle:
                if level[member] > low * (1.0 + _EQUAL):
                    rising[kept] = c
                    kept += 1
                    continue
                early[num_early] = c
                num_early += 1
            elif member >= 0 and least[member] < 1.0 - _EQUAL:
                rising[kept] = c
                kept += 1
                continue
            rates[c] = limits[usages[c]] if member < 0 else rates[c] + lowest[k]
            bottleneck[c] = member
            for entry in range(first[usages[c]], first[usages[c] + 1]):
                free[link[entry]] -= lowest[k] * seconds[entry]
        rising = rising[:kept]
    return num_early


@jit_uncounted
def _set_levels(first: Ints, link: Ints, seconds: Floats, weights: Floats, usages: Ints, scratch: Floats) -> None:
    """Sets the share of each link per connection, if all communications that still rise share what is free."""
    free, demand, level, least = scratch[0], scratch[1], scratch[2], scratch[3]
    for usage in usages:
        for entry in range(first[usage], first[usage + 1]):
            demand[link[entry]] = 0.0
    for usage in usages:
        for entry in range(first[usage], first[usage + 1]):
            demand[link[entry]] += weights[entry] * seconds[entry]
    for usage in usages:
        for entry in range(first[usage], first[usage + 1]):
            level[link[entry]] = max(free[link[entry]], 0.0) / demand[link[entry]]
            least[link[entry]] = 1.0


@jit_uncounted
def _set_lowest(
    first: Ints,
    link: Ints,
    weights: Floats,
    limits: Floats,
    usages: Ints,
    rates: Floats,
    scratch: Floats,
    lowest: Floats,
    where: Ints,
) -> None:
    """Sets the least rise of each communication with its link, and on each link the least part of its share taken."""
    level, least = scratch[2], scratch[3]
    for k in range(len(usages)):
        usage = usages[k]
        lowest[k], where[k] = np.inf, -1
        for entry in range(first[usage], first[usage + 1]):
            rise = level[link[entry]] * weights[entry]
            if rise < lowest[k]:
                lowest[k], where[k] = rise, link[entry]
        if limits[usage] - rates[k] <= lowest[k]:
            lowest[k], where[k] = limits[usage] - rates[k], -1
        for entry in range(first[usage], first[usage + 1]):
            share = level[link[entry]] * weights[entry]
            if lowest[k] < share * least[link[entry]]:
                least[link[entry]] = lowest[k] / share


@jit_uncounted
def mark(lists: LinkLists, link: int) -> None:
    """Notes that a link has changed."""
    if not lists.is_changed[link]:
        lists.is_changed[link] = True
        lists.changed[lists.num_changed[0]] = link
        lists.num_changed[0] += 1


@jit_uncounted
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


@jit_uncounted
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


@jit_uncounted
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


@jit_uncounted
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


NUM_COUNTS, NUM_TIMES = 10, 3  # of ``StepState``
(_EVENTS, _NUMBER, _BEGUN, _FREE, _SLOTS, _ENDED, _ENDS_NEXT, _SETTLES, _ALARM, OPS_ENDED) = range(NUM_COUNTS)
NOW_S, _ALARM_S, _NEXT_S = range(NUM_TIMES)
DONE, NEEDS_ROOM, PROGRESSED = range(3)
"""Reasons for which ``run_step`` returns."""


@jit_uncounted
def _push(state: StepState, at_s: float, event: int) -> None:
    """Adds an event; of events at the same time, the one added first comes first."""
    counts, times_s, numbers, events = state.counts, state.event_s, state.event_number, state.event
    at = counts[_EVENTS]
    while at > 0 and times_s[(at - 1) // 2] > at_s:
        above = (at - 1) // 2
        times_s[at], numbers[at], events[at] = times_s[above], numbers[above], events[above]
        at = above
    times_s[at], numbers[at], events[at] = at_s, counts[_NUMBER], event
    counts[_EVENTS] += 1
    counts[_NUMBER] += 1


@jit_uncounted
def _pop(state: StepState) -> int:
    """Removes the first event, and returns it."""
    times_s, numbers, events = state.event_s, state.event_number, state.event
    first = int(events[0])
    state.counts[_EVENTS] -= 1
    size, at = state.counts[_EVENTS], 0
    last_s, last = times_s[size], numbers[size]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and _is_before(state, below + 1, times_s[below], numbers[below]):
            below += 1
        if not _is_before(state, below, last_s, last):
            break
        times_s[at], numbers[at], events[at] = times_s[below], numbers[below], events[below]
        at = below
    times_s[at], numbers[at], events[at] = last_s, last, events[size]
    return first


@jit_uncounted
def _is_before(state: StepState, at: int, other_s: float, other: int) -> bool:
    """Returns True if an event comes before another one with this time and number."""
    return bool(state.event_s[at] < other_s or (state.event_s[at] == other_s and state.event_number[at] < other))


@jit_uncounted
def begin(running: Running, state: StepState, op: int, usage: int, scale: float, left: float = 1.0) -> None:
    """Starts the transfer of a usage in a free slot; a constant flow has an infinite part left."""
    counts = state.counts
    if counts[_FREE]:
        counts[_FREE] -= 1
        slot = state.free[counts[_FREE]]
    else:
        slot = counts[_SLOTS]
        counts[_SLOTS] += 1
    running.op[slot], running.usage[slot], running.scale[slot], running.left[slot] = op, usage, scale, left
    state.begun[counts[_BEGUN]] = slot
    counts[_BEGUN] += 1
    counts[_SETTLES] = 1


@jit_uncounted
def _begin_phase(running: Running, ops: StepOps, state: StepState, op: int, usage: int, scale: float) -> None:
    """Starts the transfers of all usages that begin together."""
    state.moving[op] = ops.num_flows[usage]
    for flow in range(usage, usage + ops.num_flows[usage]):
        begin(running, state, op, flow, scale)


@jit_uncounted
def _transfer(running: Running, ops: StepOps, state: StepState, op: int) -> None:
    """Starts the transfer of a communication, whose latency has passed."""
    usage, seconds = ops.usage[op], ops.duration_s[op]
    scale = (seconds - seconds * ops.fixed_share[usage]) / ops.sequence_s[usage]
    _begin_phase(running, ops, state, op, usage, scale)


@jit_uncounted
def _resolve(running: Running, ops: StepOps, state: StepState, leader: int) -> None:
    """Subtracts one of the events that a leader needs, and starts it after the last."""
    state.missing[leader] -= 1
    if state.missing[leader]:
        return
    usage, seconds, now_s = ops.usage[leader], ops.duration_s[leader], state.times_s[NOW_S]
    state.start_s[leader] = now_s
    if usage < 0 or seconds <= 0.0:
        _push(state, now_s + seconds, leader)
        return
    fixed_s = seconds * ops.fixed_share[usage]
    if fixed_s > 0.0:
        _push(state, now_s + fixed_s, -1 - leader)
    else:
        _transfer(running, ops, state, leader)


@jit_uncounted
def arrive(running: Running, ops: StepOps, state: StepState, op: int) -> None:
    """Notes that an operation is at the head of its stream."""
    leader = ops.leader[op]
    _resolve(running, ops, state, leader)
    last = state.last_arrival[leader]
    if last < 0:
        state.next_arrival[op] = op
    else:
        state.next_arrival[op], state.next_arrival[last] = state.next_arrival[last], op
    state.last_arrival[leader] = op


@jit_uncounted
def _end(running: Running, ops: StepOps, state: StepState, leader: int) -> None:
    """Ends an operation or meeting: what waits for its members, and their streams, go on."""
    state.end_s[leader] = state.times_s[NOW_S]
    last = op = state.last_arrival[leader]
    while True:
        op = state.next_arrival[op]
        for place in range(ops.first[op], ops.first[op + 1]):
            _resolve(running, ops, state, ops.follower[place])
        if ops.next_op[op] >= 0:
            arrive(running, ops, state, ops.next_op[op])
        if op == last:
            return


@jit_uncounted
def _flap(flaps: Flaps, lists: LinkLists, capacity: Floats, now_s: float) -> float:
    """Sets the bandwidth that flapping links have now, marks those that changed, and returns the next change."""
    next_s = np.inf
    for link in flaps.link:
        capacity[link] = 1.0
    for flap, link in enumerate(flaps.link):
        changes = before = flaps.num_changes[flap]
        while True:
            change_s = flaps.first_s[flap] + changes // 2 * flaps.period_s[flap] + changes % 2 * flaps.slow_s[flap]
            if change_s > now_s * (1.0 + TOGETHER):
                break
            changes += 1
        if changes > before:
            mark(lists, link)
        if changes % 2:
            capacity[link] *= flaps.share[flap]
        flaps.num_changes[flap], next_s = changes, min(next_s, change_s)
    return next_s


@jit
def _settle_step(
    paths: Paths,
    running: Running,
    lists: LinkLists,
    capacity: Floats,
    flaps: Flaps,
    state: StepState,
    segments: Segments,
    num_segments: int,
) -> int:
    """Settles all changes of this time, and sets the alarm for the next end."""
    counts, times_s, now_s = state.counts, state.times_s, state.times_s[NOW_S]
    change_s = _flap(flaps, lists, capacity, now_s)
    ended, begun = state.ended[: counts[_ENDED]], state.begun[: counts[_BEGUN]]
    num_segments, times_s[_NEXT_S], ends_next = settle(
        paths, running, lists, capacity, ended, begun, now_s, segments, num_segments
    )
    state.free[counts[_FREE] : counts[_FREE] + len(ended)] = ended
    state.ends_next[: len(ends_next)] = ends_next
    counts[_FREE] += len(ended)
    counts[_ENDED] = counts[_BEGUN] = counts[_SETTLES] = 0
    counts[_ENDS_NEXT], times_s[_ALARM_S] = len(ends_next), np.inf
    if len(ends_next):
        times_s[_ALARM_S] = now_s + max(0.0, min(change_s, times_s[_NEXT_S]) - now_s)
        counts[_ALARM] = counts[_NUMBER]
        counts[_NUMBER] += 1
    return num_segments


@jit_uncounted
def _complete(running: Running, ops: StepOps, state: StepState) -> None:
    """Ends the transfers whose time has come; of a sequence, the next one begins."""
    counts, now_s = state.counts, state.times_s[NOW_S]
    state.times_s[_ALARM_S] = np.inf
    if state.times_s[_NEXT_S] <= now_s * (1.0 + TOGETHER):  # else a flapping link changes
        counts[_ENDED] = counts[_ENDS_NEXT]
        for k in range(counts[_ENDED]):
            state.ended[k] = state.ends_next[k]
    for k in range(counts[_ENDED]):
        slot = state.ended[k]
        op, following = running.op[slot], ops.following[running.usage[slot]]
        state.moving[op] -= 1
        if state.moving[op]:
            continue
        if following >= 0:
            _begin_phase(running, ops, state, op, following, running.scale[slot])
        else:
            counts[OPS_ENDED] += 1
            _push(state, now_s, op)
    counts[_SETTLES] = 1


@jit
def run_step(
    paths: Paths,
    running: Running,
    lists: LinkLists,
    capacity: Floats,
    flaps: Flaps,
    ops: StepOps,
    state: StepState,
    segments: Segments,
    num_segments: int,
    next_report: int,
) -> tuple[int, int]:
    """Runs a step until it is done, or needs room for segments, or a number of communications have ended.

    All events of one time come before links are settled.

    Args:
        paths, running, lists, capacity: See ``settle``.
        flaps: Flapping links.
        ops, state: Operations, and their progress.
        segments, num_segments: Recorded intervals.
        next_report: Ended communications at which to return.

    Returns:
        ``DONE``, ``NEEDS_ROOM`` or ``PROGRESSED``, and the number of segments.
    """
    counts, times_s = state.counts, state.times_s
    while True:
        event_s = state.event_s[0] if counts[_EVENTS] else np.inf
        at_s = min(event_s, times_s[_ALARM_S])
        if counts[_SETTLES] and at_s > times_s[NOW_S]:
            if num_segments + counts[_SLOTS] > len(segments.op):
                return NEEDS_ROOM, num_segments
            num_segments = _settle_step(paths, running, lists, capacity, flaps, state, segments, num_segments)
            continue
        if at_s == np.inf:
            return DONE, num_segments
        times_s[NOW_S] = at_s
        if event_s > at_s or (times_s[_ALARM_S] == at_s and counts[_ALARM] < state.event_number[0]):
            _complete(running, ops, state)
            if counts[OPS_ENDED] >= next_report:
                return PROGRESSED, num_segments
            continue
        event = _pop(state)
        if event < 0:
            _transfer(running, ops, state, -1 - event)
        else:
            _end(running, ops, state, event)
