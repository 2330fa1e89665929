"""Links that running communications share max-min fairly, as SimPy events."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from simpy import Environment, Event
from simpy.events import EventPriority

from simplan.network.max_min import TOGETHER, advance, mark, settle
from simplan.network.running import LinkLists, Paths, Running, Segments
from simplan.network.usage import LinkUse

Progress = Callable[[int, int], None]
_SETTLE = EventPriority(2)
"""Priority of settling, after all other events (simpy: 0 and 1) of the same time."""
_NO_SLOTS = np.zeros(0, np.int32)


class SharedLinks:
    """Links shared by running communications.

    A communication, or each of its flows, has one progress rate on all links that it crosses. Rates change when
    communications begin and end; all changes of one time are settled together, and only communications that share links
    with a changed one, directly or through others, get new rates.

    Args:
        use: Usages of the operations.
        progress: Called with the number of ended and of all communications, a hundred times; None for no calls.
        begin_s: Time at which the simulated step begins, from which flapping links change.
    """

    def __init__(self, env: Environment, use: LinkUse, progress: Progress | None = None, begin_s: float = 0.0) -> None:
        self._env, self._use, self._progress = env, use, progress
        self._num_ended, self._num_ops = 0, int((use.usage >= 0).sum())
        self._paths = Paths.of(use.first, use.link, use.seconds, use.connections, use.transfer_s)
        self._lists = LinkLists.empty(use.num_links, self._paths)
        self._capacity = np.ones(use.num_links)
        self._following, self._num_flows = use.following.tolist(), use.num_flows.tolist()
        self._moving: dict[int, int] = {}  # running flows of each operation
        self._flaps = [flap._replace(first_s=begin_s + flap.first_s) for flap in use.flaps]
        self._num_changes = [0] * len(use.flaps)
        self._settles = False
        self._version = 0
        self._num_always = num = len(use.always)  # constant flows have the first slots and never end
        self._running = Running.empty(64 << num.bit_length())
        self._done: list[Event | None] = [None] * len(self._running.op)
        self._num_slots = num  # used or free again
        self._free: list[int] = []
        self._begun: list[int] = []  # slots of communications that begin now
        self._ended = _NO_SLOTS  # slots of communications that have ended now
        self._next, self._next_s = _NO_SLOTS, np.inf  # slots that end next, and when
        self._segments, self._num_segments = Segments.empty(len(self._done)), 0
        for slot, usage in enumerate(use.always):
            self._put(slot, len(use.usage) + usage - use.num_usages_of_ops, usage, 1.0, np.inf)

    def run(self, done: Event, op: int, usage: int, seconds: float) -> None:
        """Transfers; ``done`` is triggered at the end.

        Args:
            done: An event not yet triggered.
            op: Operation, or leader of a meeting, in ``Segments.op``.
            usage: Its first usage.
            seconds: Seconds of the operation alone, latency included.
        """
        fixed_s = seconds * float(self._use.fixed_share[usage])
        scale = (seconds - fixed_s) / float(self._use.sequence_s[usage])
        if fixed_s <= 0.0:
            self._begin(done, op, usage, scale)
            return
        latency = self._env.timeout(fixed_s)
        assert latency.callbacks is not None
        latency.callbacks.append(lambda _: self._begin(done, op, usage, scale))

    @property
    def segments(self) -> Segments:
        """Intervals of constant rates of all communications until now."""
        self._make_room()
        running = [slot for slot in range(self._num_slots) if slot < self._num_always or self._done[slot] is not None]
        slots = np.array(running, np.int32)
        self._num_segments = advance(self._running, slots, self._env.now, self._segments, self._num_segments)
        return Segments._make(column[: self._num_segments] for column in self._segments)

    def _begin(self, done: Event, op: int, usage: int, scale: float) -> None:
        """Starts all flows of a phase."""
        self._moving[op] = self._num_flows[usage]
        for flow in range(usage, usage + self._num_flows[usage]):
            self._begin_flow(done, op, flow, scale)

    def _begin_flow(self, done: Event, op: int, usage: int, scale: float) -> None:
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
            if slot == len(self._done):
                self._running = self._running.doubled()
                self._done += [None] * slot
        self._done[slot] = done
        self._put(slot, op, usage, scale, 1.0)

    def _put(self, slot: int, op: int, usage: int, scale: float, left: float) -> None:
        """Starts a communication in a free slot."""
        running = self._running
        running.op[slot], running.usage[slot], running.scale[slot], running.left[slot] = op, usage, scale, left
        self._begun.append(slot)
        self._settle_soon()

    def _make_room(self) -> None:
        """Makes room for a segment of every slot."""
        while self._num_segments + self._num_slots > len(self._segments.op):
            self._segments = self._segments.doubled()

    def _settle_soon(self) -> None:
        """Settles after all events of this time."""
        if not self._settles:
            self._settles = True
            event = Event(self._env)
            event._ok, event._value = True, None
            assert event.callbacks is not None
            event.callbacks.append(lambda _: self._settle())
            self._env.schedule(event, _SETTLE)

    def _settle(self) -> None:
        """Gives new rates to the communications that the changes reach, and sets the alarm for the next end."""
        self._settles = False
        now_s = self._env.now
        change_s = self._flap() if self._flaps else np.inf
        self._make_room()
        begun, ended = np.array(self._begun, np.int32), self._ended
        self._num_segments, self._next_s, self._next = settle(
            self._paths,
            self._running,
            self._lists,
            self._capacity,
            ended,
            begun,
            now_s,
            self._segments,
            self._num_segments,
        )
        self._free += ended.tolist()
        self._begun, self._ended = [], _NO_SLOTS
        self._version += 1
        if not len(self._next):
            return
        version = self._version
        alarm = self._env.timeout(max(0.0, min(change_s, self._next_s) - now_s))
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: self._complete() if version == self._version else None)

    def _flap(self) -> float:
        """Sets the bandwidth that flapping links have now, marks those that changed, and returns the next change."""
        flaps, until_s = self._flaps, self._env.now * (1 + TOGETHER)
        for number, flap in enumerate(flaps):
            before = self._num_changes[number]
            while flap.change_s(self._num_changes[number]) <= until_s:
                self._num_changes[number] += 1
            if self._num_changes[number] > before:
                mark(self._lists, flap.link)
        self._capacity[:] = 1.0
        for flap, changes in zip(flaps, self._num_changes, strict=True):
            if changes % 2:
                self._capacity[flap.link] *= flap.share
        return min(flap.change_s(changes) for flap, changes in zip(flaps, self._num_changes, strict=True))

    def _complete(self) -> None:
        if self._next_s <= self._env.now * (1 + TOGETHER):  # else a flapping link changes
            self._ended = self._next
        before = self._num_ended
        for slot in self._ended.tolist():
            done, self._done[slot] = self._done[slot], None
            assert done is not None
            op, following = int(self._running.op[slot]), self._following[self._running.usage[slot]]
            self._moving[op] -= 1
            if self._moving[op]:
                continue
            if following >= 0:
                self._begin(done, op, following, float(self._running.scale[slot]))
                continue
            self._num_ended += op < len(self._use.usage)
            done.succeed()
        if self._progress is not None and 100 * self._num_ended // self._num_ops > 100 * before // self._num_ops:
            self._progress(self._num_ended, self._num_ops)
        self._settle_soon()
