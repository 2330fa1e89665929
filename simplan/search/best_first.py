"""The loop of a search: rules, bounds of all, then truncated steps of the most promising, then whole ones of the best.

Exact: a candidate is left out only when it breaks a rule, does not fit, or could not be kept whatever its time. Only
plans whose bounds leave them a place are simulated: of the others nobody knows whether they fit. What is ranked has the
numbers of ``predict``. How many candidates are bounded depends on neither
the number of processes nor their speed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluator import AT_ONCE, Evaluator
from simplan.search.keep import Keep
from simplan.search.tally import MORE_MEMORY, ROUNDING, Limits, Miss, OnProgress, Tally, Waiting, rounded

__all__ = ["explore_best_first"]

_WINDOW = 200_000
"""Candidates that wait, at most."""
_BATCH = 1024
_FIRST_LOOK_S = 0.4
"""Who watches sees plans after so long; the next looks come after twice as long each."""
_FIRST_LOOK = 16_384
"""Candidates after which everybody does, and again after as many as there were: whoever stops a slow search wants to
have a plan."""
_MOST_BEYOND = 256
"""Candidates that do not fit by a bound, of which the nearest misses are found."""
_FEW_MISSES = 16


def explore_best_first(
    enumeration: Enumeration,
    meshes: Sequence[Mesh],
    evaluator: Evaluator,
    limits: Limits,
    keep: Keep,
    tally: Tally,
    on_progress: OnProgress,
    *,
    soon: bool = False,
) -> None:
    """Goes through all candidates of some meshes. Nearest misses are those that would have been among the best.

    Args:
        enumeration: The space.
        meshes: Which part of it.
        evaluator: Of the same question.
        limits: What a plan must keep within.
        keep: Takes the best; what it holds already bounds the others.
        tally: Takes the counts. Both are right up to the last batch when this is interrupted.
        on_progress: Called after every batch.
        soon: Look at the most promising so far early, before all bounds are known.
    """
    search = _Search(evaluator, limits, keep, tally, on_progress)
    pause_s, look = _FIRST_LOOK_S, _FIRST_LOOK
    look_s = time.monotonic() + pause_s
    bounded = 0
    keep.begin()
    candidates = enumeration.candidates(meshes, tally.rejected)
    while batch := list(islice(candidates, _BATCH)):
        search.bound(batch)
        bounded += len(batch)
        on_progress(tally, keep)
        if len(search.waiting) >= _WINDOW:
            search.look()
        elif search.waiting and (bounded >= look or (soon and time.monotonic() > look_s)):
            search.look(AT_ONCE)
            pause_s *= 2
            look_s = time.monotonic() + pause_s
            look = max(look, 2 * bounded) if bounded >= look else look
    search.look()
    search.verify()
    search.find_misses()
    on_progress(tally, keep)


class _Beyond(NamedTuple):
    """A candidate that does not fit. Order: what it lacks, then the plan.

    Attributes:
        lacking: Bytes too many, at least.
        candidate: The plan.
        is_known: It lacks just so many.
    """

    lacking: int
    candidate: Candidate
    is_known: bool


class _Search:
    """A search under way; see ``explore_best_first`` for the arguments.

    Attributes:
        waiting: Candidates that nobody has looked at.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        limits: Limits,
        keep: Keep,
        tally: Tally,
        on_progress: OnProgress,
    ) -> None:
        self._evaluator, self._limits = evaluator, limits
        self._keep, self._tally, self._told = keep, tally, on_progress
        self.waiting: list[Waiting] = []
        self._beyond: list[_Beyond] = []
        self._cut: list[Waiting] = []  # left out by bounds
        self._timed: dict[Candidate, tuple[int, float]] = {}
        self._whole: set[Candidate] = set()

    def bound(self, batch: Sequence[Candidate]) -> None:
        """Bounds of some candidates; those of memory reject, and the others wait."""
        capacity = self._limits.device_bytes
        least_bytes = self._least_bytes(batch, capacity)
        inside: list[tuple[Candidate, int]] = []
        outside: list[tuple[Candidate, int]] = []
        for candidate, size in zip(batch, least_bytes, strict=True):
            (inside if capacity is None or size <= capacity else outside).append((candidate, size))
        self.waiting += self._bounded(inside)
        if capacity is not None:
            self._tally.too_large([], far=len(outside))
            self._miss([_Beyond(size - capacity, candidate, False) for candidate, size in outside])
            self._tally.almost(self._bounded([one for one in outside if one[1] <= MORE_MEMORY * capacity]))

    def look(self, number: int | None = None) -> None:
        """Memory and time of those that wait, the most promising first; of so many, or of all."""
        self.waiting.sort()
        part, self.waiting = self.waiting[:number], [] if number is None else self.waiting[number:]
        left = self._left(part)
        while batch := list(islice(left, AT_ONCE)):
            self._take(batch)
            self._told(self._tally, self._keep)

    def find_misses(self) -> None:
        """The nearest misses: of those that would be among the best as far as bounds tell.

        Where there is a plan they are no more than advice, and few are looked at whose memory is not known yet.
        """
        capacity, tally = self._limits.device_bytes, self._tally
        left = _FEW_MISSES if self._keep.ranked else _MOST_BEYOND
        for one in sorted(self._beyond):
            if capacity is None or tally.is_far(one.lacking):
                break
            size = capacity + one.lacking
            [waiting] = self._bounded([(one.candidate, size)])
            if self._keep.is_hopeless(one.candidate.num_devices, size, waiting.least_time_s):
                continue
            if not one.is_known:
                if not left:
                    continue
                left -= 1
                [(size, _)] = self._evaluator.numbers([one.candidate], 0)
            tally.missed([Miss(size - capacity, one.candidate, size)])

    def _miss(self, beyond: Iterable[_Beyond]) -> None:
        self._beyond = heapq.nsmallest(_MOST_BEYOND, [*self._beyond, *beyond])

    def _least_bytes(self, batch: Sequence[Candidate], capacity: int | None) -> list[int]:
        """Bounds: the costlier ones only where the cheap ones do not tell."""
        evaluator, found = self._evaluator, []
        for candidate in batch:
            size = evaluator.average_bytes(candidate)
            if capacity is None or size <= MORE_MEMORY * capacity:
                size = max(size, evaluator.least_bytes(candidate))
            found.append(size)
        return found

    def _bounded(self, sized: Sequence[tuple[Candidate, int]]) -> list[Waiting]:
        found = []
        for candidate, size in sized:
            bound_s = self._evaluator.least_time_s(candidate)
            value = self._keep.goal.values(candidate.num_devices, size, bound_s * ROUNDING)[0]
            found.append(Waiting(value, bound_s * ROUNDING, size, candidate))
        return found

    def _left(self, waiting: Iterable[Waiting]) -> Iterator[Waiting]:
        """Those that no bound cuts, by what is known when each is asked for."""
        deadline_s, keep, tally = self._limits.step_time_s, self._keep, self._tally
        for one in waiting:
            late = deadline_s is not None and one.least_time_s > deadline_s
            if late and (keep.ranked or tally.is_later(one.least_time_s, deadline_s or 0.0)):
                tally.too_late(1)
            elif keep.is_hopeless(one.candidate.num_devices, one.device_bytes, one.least_time_s):
                tally.bounded += 1
                self._cut.append(one)
            else:
                yield one

    def _take(self, batch: Sequence[Waiting]) -> None:
        """Memory, and times of those that fit."""
        capacity, deadline_s, tally = self._limits.device_bytes, self._limits.step_time_s, self._tally
        numbers = self._evaluator.numbers([one.candidate for one in batch], capacity)
        for one, (size, exact_s) in zip(batch, numbers, strict=True):
            if exact_s is None:
                assert capacity is not None
                tally.too_large([], far=1)
                self._miss([_Beyond(size - capacity, one.candidate, True)])
                if size <= MORE_MEMORY * capacity:
                    tally.almost([one])
                continue
            step_time_s = rounded(exact_s)
            if deadline_s is not None and step_time_s * ROUNDING > deadline_s:
                tally.too_late(1, [Miss(step_time_s - deadline_s, one.candidate, size, step_time_s)])
            else:
                tally.timed += 1
                self._timed[one.candidate] = size, step_time_s
                self._keep.add(one.candidate, size, step_time_s)

    def verify(self) -> None:
        """Gives what is kept the numbers of ``predict``, and looks again where these are others.

        A truncated step is no longer than the whole one. So a plan that was left out by the truncated steps of others
        may only come back where a whole step is longer.
        """
        keep, capacity, deadline_s = self._keep, self._limits.device_bytes, self._limits.step_time_s
        while unknown := [timed for timed in (*keep.ranked, *keep.front) if self._is_unknown(timed.candidate)]:
            plans = list(dict.fromkeys(timed.candidate for timed in unknown))
            whole = self._evaluator.numbers(plans, capacity, whole=True)
            differs = False
            for candidate, (size, exact_s) in zip(plans, whole, strict=True):
                self._whole.add(candidate)
                truncated = self._timed[candidate]
                if exact_s is not None and (size, rounded(exact_s)) == truncated:
                    continue
                differs = True
                del self._timed[candidate]
                if exact_s is not None and (deadline_s is None or exact_s * ROUNDING <= deadline_s):
                    self._timed[candidate] = size, rounded(exact_s)
            if differs:
                keep.restart()
                for candidate, numbers in self._timed.items():
                    keep.add(candidate, *numbers)
                self.waiting, self._cut = self._cut, []
                self._tally.bounded -= len(self.waiting)
                self.look()

    def _is_unknown(self, candidate: Candidate) -> bool:
        """Whether a candidate of this search has the numbers of a truncated step."""
        return candidate in self._timed and candidate not in self._whole and self._evaluator.is_truncated(candidate)
