"""Links that running communications share max-min fairly, as SimPy events."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy import Environment, Event
from simpy.events import EventPriority

from simplan.network.max_min import connected, fair_rates, weights_of
from simplan.network.usage import LinkUse

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int32]
Progress = Callable[[int, int], None]
_SETTLE = EventPriority(2)
"""Priority of settling, after all other events (simpy: 0 and 1) of the same time."""
_TOGETHER = 1e-14
"""Relative difference of times below which transfers end together: rounding separates equal ones."""


class Segments(NamedTuple):
    """Intervals in which a communication transfers at a constant rate.

    Attributes:
        op: ``(num_segments,)`` Operation, or leader of the meeting; constant flows follow the operations.
        start_s, end_s: ``(num_segments,)`` Seconds from the start of the step.
        rate: ``(num_segments,)`` Progress per second, where the transfer alone takes ``LinkUse.transfer_s``.
        bottleneck: ``(num_segments,)`` Link that limits the rate; -1 if the communication is as fast as alone.
    """

    op: _Ints
    start_s: _Floats
    end_s: _Floats
    rate: _Floats
    bottleneck: _Ints

    @classmethod
    def none(cls) -> Segments:
        """No intervals."""
        return cls(np.zeros(0, np.int32), np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int32))


class SharedLinks:
    """Links shared by running communications.

    A communication has one progress rate on all links that it crosses. Rates change when communications begin and end;
    all changes of one time are settled together, and only communications that share links with a changed one, directly
    or through others, get new rates.

    Args:
        use: Usages of the operations.
        progress: Called with the number of ended and of all communications, a hundred times; None for no calls.
    """

    def __init__(self, env: Environment, use: LinkUse, progress: Progress | None = None) -> None:
        self._env, self._use, self._progress = env, use, progress
        self._num_ended, self._num_ops = 0, int((use.usage >= 0).sum())
        self._weights = weights_of(use.first, use.seconds, use.connections)
        with np.errstate(divide="ignore"):
            self._limits = 1.0 / use.transfer_s
        self._scratch = np.zeros((4, use.num_links))
        self._capacity = np.ones(use.num_links)
        self._num_changes = [0] * len(use.flaps)
        self._is_changed = np.zeros(use.num_links, np.bool_)
        self._settles = False
        self._version = 0
        self._segments: list[tuple[NDArray[np.generic], ...]] = []
        always = np.array(use.always, np.int32)
        self._num = len(always)  # running communications; constant flows come first and never end
        size = max(64, 2 * self._num)
        self._op, self._usage, self._bottleneck = (np.full(size, -1, np.int32) for _ in range(3))
        # seconds alone over those of the usage: an uncertain or slow operation takes longer
        self._scale, self._left, self._rate, self._updated_s, self._end_s = (np.zeros(size) for _ in range(5))
        self._done: list[Event | None] = [None] * size
        self._usage[: self._num], self._scale[: self._num], self._left[: self._num] = always, 1.0, np.inf
        self._op[: self._num] = len(use.usage) + always - use.num_usages_of_ops
        self._end_s[: self._num] = np.inf
        if self._num:
            self._mark(0, self._num)

    def run(self, done: Event, op: int, seconds: float) -> None:
        """Transfers; ``done`` is triggered at the end.

        Args:
            done: An event not yet triggered.
            op: Operation, or leader of a meeting, with a usage.
            seconds: Seconds of the operation alone, latency included.
        """
        usage = int(self._use.usage[op])
        fixed_s = seconds * float(self._use.fixed_share[usage])
        scale = (seconds - fixed_s) / float(self._use.transfer_s[usage])
        if fixed_s <= 0.0:
            self._begin(done, op, scale)
            return
        latency = self._env.timeout(fixed_s)
        assert latency.callbacks is not None
        latency.callbacks.append(lambda _: self._begin(done, op, scale))

    @property
    def segments(self) -> Segments:
        """Intervals of constant rates of all communications that have ended, and of constant flows until now."""
        self._advance(np.arange(len(self._use.always), dtype=np.int32))
        if not self._segments:
            return Segments.none()
        return Segments(*map(np.concatenate, zip(*self._segments, strict=True)))

    def _begin(self, done: Event, op: int, scale: float) -> None:
        slot = self._num
        if slot == len(self._op):
            self._grow()
        self._num += 1
        self._op[slot], self._usage[slot], self._scale[slot] = op, self._use.usage[op], scale
        self._left[slot], self._rate[slot], self._updated_s[slot] = 1.0, 0.0, self._env.now
        self._end_s[slot] = np.inf
        self._done[slot] = done
        self._mark(slot, slot + 1)

    def _grow(self) -> None:
        for name in ("_op", "_usage", "_bottleneck", "_scale", "_left", "_rate", "_updated_s", "_end_s"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
        self._done += [None] * len(self._done)

    def _mark(self, begin: int, end: int) -> None:
        """Marks the links of some running communications as changed, and settles after all events of this time."""
        for usage in self._usage[begin:end].tolist():
            self._is_changed[self._use.link[self._use.first[usage] : self._use.first[usage + 1]]] = True
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
        use, num, now_s = self._use, self._num, self._env.now
        change_s = self._flap() if use.flaps else np.inf
        reached = connected(use.first, use.link, self._usage[:num], self._is_changed)
        self._is_changed[:] = False
        if len(reached):
            self._advance(reached)
            usages = self._usage[reached]
            rates, self._bottleneck[reached] = fair_rates(
                use.first, use.link, use.seconds, self._weights, self._limits, self._capacity, usages, self._scratch
            )
            self._rate[reached] = rates / self._scale[reached]
            self._end_s[reached] = now_s + self._left[reached] / self._rate[reached]
        self._version += 1
        if num == len(use.always):
            return
        version = self._version
        alarm = self._env.timeout(max(0.0, min(change_s, float(self._end_s[:num].min())) - now_s))
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: self._complete() if version == self._version else None)

    def _flap(self) -> float:
        """Sets the bandwidth that flapping links have now, marks those that changed, and returns the next change."""
        flaps, until_s = self._use.flaps, self._env.now * (1 + _TOGETHER)
        for number, flap in enumerate(flaps):
            before = self._num_changes[number]
            while flap.change_s(self._num_changes[number]) <= until_s:
                self._num_changes[number] += 1
            if self._num_changes[number] > before:
                self._is_changed[flap.link] = True
        self._capacity[:] = 1.0
        for flap, changes in zip(flaps, self._num_changes, strict=True):
            if changes % 2:
                self._capacity[flap.link] *= flap.share
        return min(flap.change_s(changes) for flap, changes in zip(flaps, self._num_changes, strict=True))

    def _advance(self, slots: _Ints) -> None:
        """Subtracts the progress since the last change, and records it."""
        now_s = self._env.now
        start_s, rate = self._updated_s[slots], self._rate[slots]
        self._left[slots] -= rate * (now_s - start_s)
        self._updated_s[slots] = now_s
        moved = (rate > 0) & (now_s > start_s)
        if moved.any():
            slots, start_s, rate = slots[moved], start_s[moved], rate[moved]
            end_s = np.full(len(slots), now_s)
            rate = rate * self._scale[slots]
            self._segments.append((self._op[slots], start_s, end_s, rate, self._bottleneck[slots]))

    def _complete(self) -> None:
        now_s = self._env.now
        ended = np.flatnonzero(self._end_s[: self._num] <= now_s * (1 + _TOGETHER)).astype(np.int32)
        self._advance(ended)
        if self._progress is not None:
            before, self._num_ended = self._num_ended, self._num_ended + len(ended)
            if 100 * self._num_ended // self._num_ops > 100 * before // self._num_ops:
                self._progress(self._num_ended, self._num_ops)
        for slot in ended[::-1].tolist():
            self._mark(slot, slot + 1)
            done = self._done[slot]
            assert done is not None
            done.succeed()
            self._num -= 1
            last = self._num
            for array in (self._op, self._usage, self._bottleneck, self._scale, self._left, self._rate):
                array[slot] = array[last]
            self._updated_s[slot], self._end_s[slot] = self._updated_s[last], self._end_s[last]
            self._done[slot], self._done[last] = self._done[last], None
        if not len(ended):  # a flapping link changes
            self._mark(0, 0)
