"""The loop of a search: rules, then memory, then bounds, then time.

Exact: a candidate is left out only when it breaks a rule, does not fit, or could not be kept whatever its time. What is
remembered does not grow with the space: the best, the front, the nearest misses, and a window of candidates that fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import TypeVar

from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluator import Evaluator
from simplan.search.floor import MemoryFloor
from simplan.search.keep import Keep
from simplan.search.tally import MORE_MEMORY, ROUNDING, Limits, Miss, OnProgress, Tally, Waiting, rounded

__all__ = ["explore"]

_WINDOW = 100_000
"""Candidates that fit and wait to be timed, at most."""
_WINDOW_S = 10.0
"""After so long they are timed, however few: whoever stops a slow search wants to have a plan."""
_FIRST_LOOK_S = 0.4
"""Who watches sees plans after so long; the next looks come after twice as long each."""
_MEMORY_BATCH = 16384
_TIME_BATCH = 256
_FIRST_SLAB = 64
_FIRST_BATCH = 16
_LONG_S = 2.0

_Item = TypeVar("_Item")


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
        value = keep.goal.values(candidate.num_devices, size, bound_s * ROUNDING)[0]
        found.append(Waiting(value, bound_s * ROUNDING, size, candidate))
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
        if (
            deadline_s is not None
            and one.least_time_s > deadline_s
            and (keep.ranked or tally.is_later(one.least_time_s, deadline_s))
        ):
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
        if deadline_s is not None and step_time_s * ROUNDING > deadline_s:
            tally.too_late(1, [Miss(step_time_s - deadline_s, one.candidate, one.device_bytes, step_time_s)])
        else:
            tally.timed += 1
            keep.add(one.candidate, one.device_bytes, step_time_s)


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
