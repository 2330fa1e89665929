"""Communications that run on shared links, as the arrays that ``simplan.network.max_min`` computes with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def weights_of(seconds: Floats, connections: Floats) -> Floats:
    """Returns the progress rate of a usage at one full link per connection, for each of its links; 1/s.

    Args:
        seconds: ``(num_entries,)`` Busy seconds of the links of all usages, above 0.
        connections: ``(num_entries,)`` Connections on these links, above 0.
    """
    return connections / seconds


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
        return cls(first, link, seconds, weights_of(seconds, connections), limits, owner)


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
        num_entries, num_usages = len(paths.link), len(paths.limits)
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


class StepOps(NamedTuple):
    """Operations of a step, and the order in which they run; never written to.

    Attributes:
        leader: ``(num_ops,)`` First operation of each operation's meeting, or itself without a meeting.
        next_op: ``(num_ops,)`` Next operation of the same stream; -1 for none.
        first: ``(num_ops + 1,)`` Offsets into ``follower``.
        follower: Leaders that wait for each operation.
        duration_s: ``(num_ops,)`` Seconds of each leader alone.
        usage: ``(num_ops,)`` First usage of each leader; -1 for an operation that crosses no shared link.
        fixed_share, sequence_s: ``(num_usages,)`` See ``LinkUse``.
        following: ``(num_usages,)`` First usage of the next phase of the sequence; -1 for none.
        num_flows: ``(num_usages,)`` Usages that begin together with each, itself among them.
    """

    leader: Ints
    next_op: Ints
    first: npt.NDArray[np.int64]
    follower: Ints
    duration_s: Floats
    usage: Ints
    fixed_share: Floats
    sequence_s: Floats
    following: Ints
    num_flows: npt.NDArray[np.int64]


class Flaps(NamedTuple):
    """Links that are slow for a part of the time: columns of ``simplan.network.usage.Flap``.

    Attributes:
        num_changes: ``(num_flaps,)`` Changes so far.
    """

    link: Ints
    share: Floats
    first_s: Floats
    slow_s: Floats
    period_s: Floats
    num_changes: npt.NDArray[np.int64]


class StepState(NamedTuple):
    """Progress of the operations of a step, and its events to come.

    Attributes:
        missing: ``(num_ops,)`` By leader, members that are not yet at the head of their stream, and operations that
            members wait for.
        last_arrival: ``(num_ops,)`` By leader, the last member that came to the head of its stream; -1 for none.
        next_arrival: ``(num_ops,)`` The member that came next; after the last one, the first.
        moving: ``(num_ops,)`` Running usages of each leader.
        start_s, end_s: ``(num_ops,)`` Start and end of each leader, in seconds.
        event_s, event_number, event: ``(num_streams,)`` Heap of events by time and then by number: a leader ends, or
            -1 minus a leader whose latency ends.
        begun, free, ended, ends_next: ``(num_slots,)`` Slots that begin now, that are free again, that end now, and
            that end next.
        counts, times_s: Counters and times of the event loop.
    """

    missing: Ints
    last_arrival: Ints
    next_arrival: Ints
    moving: Ints
    start_s: Floats
    end_s: Floats
    event_s: Floats
    event_number: npt.NDArray[np.int64]
    event: Ints
    begun: Ints
    free: Ints
    ended: Ints
    ends_next: Ints
    counts: npt.NDArray[np.int64]
    times_s: Floats
