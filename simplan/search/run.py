"""The loop of a search: rules, then memory, then bounds, then time.

Exact: a candidate is left out only when it breaks a rule, does not fit, or could not be kept whatever its time. What is
remembered does not grow with the space: the best, the front, the nearest misses, and a window of candidates that fit.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluator import Evaluator
from simplan.search.floor import MemoryFloor
from simplan.search.keep import Keep

__all__ = ["MORE_MEMORY", "Limits", "Miss", "OnProgress", "Tally", "Waiting", "explore", "rounded"]

_WINDOW = 100_000
"""Candidates that fit and wait to be timed, at most."""
_WINDOW_S = 10.0
"""After so long they are timed, however few: whoever stops a slow search wants to have a plan."""
_FIRST_LOOK_S = 0.4
"""Who watches sees plans after so long; the next looks come after twice as long each."""
_MEMORY_BATCH = 16384
_TIME_BATCH = 256
MORE_MEMORY = 1.1
_MOST_NEARLY = 256
_FIRST_SLAB = 64
_FIRST_BATCH = 16
_LONG_S = 2.0
_ROUNDING = 1 - 1e-9  # a bound or a deadline may be a sum in another order than the time it is compared with

OnProgress = Callable[["Tally", Keep], None]
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep within.

    Attributes:
        device_bytes: Memory of a device that may be used; None when it is unknown.
        step_time_s: The deadline; None for none.
        num_misses: Nearest misses to remember.
    """

    device_bytes: int | None
    step_time_s: float | None = None
    num_misses: int = 3


class Miss(NamedTuple):
    """A candidate that broke nothing but a limit. Order: what it lacks, then the plan.

    Attributes:
        lacking: Bytes too many, or, where nothing is within the deadline, seconds too many.
        candidate: The plan.
        device_bytes: What it needs.
        step_time_s: Its time; None when it does not fit.
    """

    lacking: float
    candidate: Candidate
    device_bytes: int
    step_time_s: float | None = None


class Waiting(NamedTuple):
    """A candidate that is not timed yet. Order: what its first objective is at least, then the same of its time."""

    value: float
    least_time_s: float
    device_bytes: int
    candidate: Candidate


@dataclass(slots=True)
class Tally:
    """Where every candidate went.

    Attributes:
        rejected: By rule, memory and deadline among them.
        bounded: Could not have been kept.
        timed: The others.
        misses: The nearest that do not fit.
        late: The nearest that fit and are too slow.
        nearly: Of those that ``MORE_MEMORY`` would make fit, the ones with the least bounds.
        num_misses: How many misses of each kind to remember.
    """

    num_misses: int = 3
    rejected: Counter[str] = field(default_factory=Counter)
    bounded: int = 0
    timed: int = 0
    misses: list[Miss] = field(default_factory=list)
    late: list[Miss] = field(default_factory=list)
    nearly: list[Waiting] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Candidates dealt with."""
        return self.rejected.total() + self.bounded + self.timed

    def merge(self, other: Tally) -> None:
        """Adds what another search counted."""
        self.rejected.update(other.rejected)
        self.bounded += other.bounded
        self.timed += other.timed
        self.misses = heapq.nsmallest(self.num_misses, [*self.misses, *other.misses])
        self.late = heapq.nsmallest(self.num_misses, [*self.late, *other.late])
        self.almost(other.nearly)

    def almost(self, nearly: Iterable[Waiting]) -> None:
        """Candidates that a little more memory would make fit."""
        self.nearly = heapq.nsmallest(_MOST_NEARLY, [*self.nearly, *nearly])

    def is_far(self, lacking: float) -> bool:
        """Whether enough misses are nearer than one that lacks at least so much."""
        return len(self.misses) == self.num_misses and lacking > self.misses[-1].lacking

    def too_large(self, misses: Iterable[Miss], far: int = 0) -> None:
        """Candidates that do not fit, and how many more that do not by far."""
        found = list(misses)
        self.rejected["memory"] += len(found) + far
        self.misses = heapq.nsmallest(self.num_misses, [*self.misses, *found])

    def too_late(self, number: int, misses: Iterable[Miss] = ()) -> None:
        """Candidates beyond the deadline; misses are those whose time is known."""
        self.rejected["max_step_time_s"] += number
        self.late = heapq.nsmallest(self.num_misses, [*self.late, *misses])


def explore(
    enumeration: Enumeration,
    meshes: Sequence[Mesh],
    evaluator: Evaluator,
    limits: Limits,
    keep: Keep,
    tally: Tally,
    on_progress: OnProgress | None = None,
    *,
    soon: bool = False,
) -> None:
    """Goes through all candidates of some meshes.

    Args:
        enumeration: The space.
        meshes: Which part of it.
        evaluator: Of the same question.
        limits: What a plan must keep within.
        keep: Takes the best; what it holds already bounds the others.
        tally: Takes the counts. Both are right up to the last batch when this is interrupted.
        on_progress: Called after every batch.
        soon: Time the most promising now and then, long before the window is full.
    """
    told = on_progress or (lambda *_: None)
    waiting: list[Waiting] = []
    opened_s = time.monotonic()
    look_s, pause_s = opened_s + _FIRST_LOOK_S, _FIRST_LOOK_S
    for batch in _batches(enumeration.candidates(meshes, tally.rejected), _Pace(_MEMORY_BATCH)):
        waiting += _fitting(batch, evaluator, enumeration.floor, limits, keep, tally)
        told(tally, keep)
        if len(waiting) >= _WINDOW or time.monotonic() - opened_s > _WINDOW_S:
            _time_all(waiting, enumeration, evaluator, limits, keep, tally, told)
            waiting, opened_s = [], time.monotonic()
        elif soon and waiting and time.monotonic() > look_s:
            waiting.sort()
            _time_all(waiting[:_FIRST_SLAB], enumeration, evaluator, limits, keep, tally, told)
            del waiting[:_FIRST_SLAB]
            pause_s *= 2
            look_s = time.monotonic() + pause_s
    _time_all(waiting, enumeration, evaluator, limits, keep, tally, told)
    told(tally, keep)


def _fitting(
    batch: Sequence[Candidate],
    evaluator: Evaluator,
    floor: MemoryFloor,
    limits: Limits,
    keep: Keep,
    tally: Tally,
) -> list[Waiting]:
    """Those that fit, with their bounds; memory first."""
    capacity = limits.device_bytes
    possible = batch
    if capacity is not None:
        possible = _near(batch, [floor.bytes(candidate) for candidate in batch], capacity, tally)
        possible = _near(possible, evaluator.least_bytes(possible), capacity, tally)
    fits: list[tuple[Candidate, int]] = []
    nearly: list[tuple[Candidate, int]] = []
    misses: list[Miss] = []
    for candidate, size in zip(possible, evaluator.device_bytes(possible), strict=True):
        if capacity is None or size <= capacity:
            fits.append((candidate, size))
            continue
        misses.append(Miss(size - capacity, candidate, size))
        if size <= MORE_MEMORY * capacity:
            nearly.append((candidate, size))
    tally.too_large(misses, len(batch) - len(possible))
    tally.almost(_bounds(nearly, evaluator, keep))
    return _bounds(fits, evaluator, keep)


def _near(batch: Sequence[Candidate], least_bytes: Sequence[int], capacity: int, tally: Tally) -> list[Candidate]:
    """Those that may fit, or may be among the nearest that do not."""
    return [
        candidate
        for candidate, least in zip(batch, least_bytes, strict=True)
        if least <= MORE_MEMORY * capacity or not tally.is_far(least - capacity)
    ]


def _bounds(sized: Sequence[tuple[Candidate, int]], evaluator: Evaluator, keep: Keep) -> list[Waiting]:
    least_s = evaluator.least_time_s([candidate for candidate, _ in sized])
    found = []
    for (candidate, size), bound_s in zip(sized, least_s, strict=True):
        value = keep.goal.values(candidate.num_devices, size, bound_s * _ROUNDING)[0]
        found.append(Waiting(value, bound_s * _ROUNDING, size, candidate))
    return found


def _time_all(
    waiting: list[Waiting],
    enumeration: Enumeration,
    evaluator: Evaluator,
    limits: Limits,
    keep: Keep,
    tally: Tally,
    told: OnProgress,
) -> None:
    """The most promising first; slabs grow, so that the first ones make bounds for the others."""
    waiting.sort()
    pace = _Pace(_TIME_BATCH)
    start, slab = 0, _FIRST_SLAB
    while start < len(waiting):
        part = sorted(waiting[start : start + slab], key=lambda one: _group(one.candidate, enumeration))
        start, slab = start + slab, min(2 * slab, _MEMORY_BATCH)
        for _, group in groupby(part, key=lambda one: _group(one.candidate, enumeration)):
            for batch in _batches(group, pace):
                _time(batch, evaluator, limits, keep, tally)
                told(tally, keep)


def _time(batch: Sequence[Waiting], evaluator: Evaluator, limits: Limits, keep: Keep, tally: Tally) -> None:
    """Times those that a bound does not cut."""
    deadline_s = limits.step_time_s
    left: list[Waiting] = []
    bounded = late = 0
    for one in batch:
        if deadline_s is not None and one.least_time_s > deadline_s and _is_later(one, deadline_s, keep, tally):
            late += 1
        elif keep.is_hopeless(one.candidate.num_devices, one.device_bytes, one.least_time_s):
            bounded += 1
        else:
            left.append(one)
    times_s = evaluator.step_times_s([one.candidate for one in left])
    tally.too_late(late)
    tally.bounded += bounded
    for one, exact_s in zip(left, times_s, strict=True):
        step_time_s = rounded(exact_s)
        if deadline_s is not None and step_time_s * _ROUNDING > deadline_s:
            tally.too_late(1, [Miss(step_time_s - deadline_s, one.candidate, one.device_bytes, step_time_s)])
        else:
            tally.timed += 1
            keep.add(one.candidate, one.device_bytes, step_time_s)


def rounded(step_time_s: float) -> float:
    """To 12 digits: sums of the same numbers in another order are one time, and no front is made of their difference.

    >>> rounded(0.1 + 0.2)
    0.3
    """
    return float(f"{step_time_s:.12g}")


def _is_later(one: Waiting, deadline_s: float, keep: Keep, tally: Tally) -> bool:
    """Whether its time does not matter: something is within the deadline, or enough is nearer to it."""
    if keep.ranked:
        return True
    return len(tally.late) == tally.num_misses and one.least_time_s - deadline_s > tally.late[-1].lacking


def _group(candidate: Candidate, enumeration: Enumeration) -> tuple[str, int, int, int]:
    """Candidates that evaluators do well together: they share a table of actions."""
    return candidate.schedule, candidate.pp, enumeration.num_microbatches(candidate), candidate.virtual_stages


class _Pace:
    """How many candidates to do at once: few while they take long, so that progress is seen and bounds come early.

    Args:
        most: At most so many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = _FIRST_BATCH

    def took(self, seconds: float) -> None:
        """How long the last ones took."""
        if seconds > _LONG_S:
            self.size = max(1, self.size // 2)
        elif seconds < _LONG_S / 2:
            self.size = min(2 * self.size, self._most)


def _batches(items: Iterable[_Item], pace: _Pace) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, pace.size)):
        started_s = time.monotonic()
        yield batch
        pace.took(time.monotonic() - started_s)
