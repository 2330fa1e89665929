"""Main loop of a search: rules and bounds of all candidates, then truncated steps, most promising first.

The loop is exact: it excludes a candidate only if the candidate violates a rule, does not fit, or is pruned by its
bound. Only plans that survive pruning are simulated, so it is unknown if pruned plans fit. Each candidate is compared
with the best plans of all candidates before it. Workers evaluate the next ones meanwhile, and what pruning excludes in
the end is dropped. So the result depends neither on the number of workers nor on their speed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.search.bounds.layer_sums import Floats
from simplan.search.candidates import Candidates, Column, plan_order
from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluation.evaluator import Evaluator, Numbers
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.incumbents import Incumbents
from simplan.search.space import SearchedOptions, SearchSpace, capacity_bytes
from simplan.search.statistics import MORE, ROUNDING, InfeasiblePlan, Statistics, Waiting, rounded

OnProgress = Callable[[str, int, int | None], None]
_MAX_BEYOND = 256
"""Candidates over memory that are considered as near misses."""
_FEW_MISSES = 16
_FEW_IN_HASTE = 8
_PART_ROWS = 2048
"""Fewest candidates to bound together in a worker."""


class _Beyond(NamedTuple):
    """A plan that does not fit, sorted by the missing bytes, then by plan fields.

    Attributes:
        lacking: Lower bound on the bytes over the limit.
        step_time_s: Lower bound on the step time.
        is_known: True if ``lacking`` is exact.
    """

    lacking: int
    order: tuple[object, ...]
    plan: ParallelPlan
    step_time_s: float
    is_known: bool


class Exploration:
    """Exploration of the candidates for one number of devices and one software.

    Args:
        job: Job on these devices and with these options of the software, without the searched plan fields.
        space: Ranges and limits of the search.
        workers: Workers of the search.
        incumbents: Best plans, updated; they also prune candidates.
        statistics: Counts, updated. Both are consistent up to the last candidate after an interruption.
        on_progress: Called after each part of a phase with its name, the parts done, and an upper bound on all parts.
        options: Searched options of the software, as the job has them.
    """

    def __init__(
        self,
        job: Job,
        space: SearchSpace,
        calibration: Calibration | None,
        workers: WorkerPool,
        incumbents: Incumbents,
        statistics: Statistics,
        on_progress: OnProgress,
        options: SearchedOptions = (),
    ) -> None:
        self.options = options
        self.job, self.capacity_bytes, self.deadline_s = job, capacity_bytes(job, space), space.max_step_time_s
        self._memory_bytes = job.cluster.largest_memory_bytes or 0
        self.enumeration, self.evaluator = Enumeration(space, job), Evaluator(job, calibration)
        self._workers, self._incumbents, self._statistics, self._told = workers, incumbents, statistics, on_progress
        self._rows: Candidates | None = None  # candidates that fit by their bounds, most promising first
        self._bounded: list[tuple[Candidates, Column, Floats]] = []  # those that fit, until they are queued
        self._least_bytes: Column = np.zeros(0, np.int64)
        self._least_s: Floats = np.zeros(0)
        self._left: list[int] = []  # rows not evaluated yet, ascending
        self._evaluated: Iterator[tuple[int, Numbers]] | None = None  # numbers of rows that are not pruned
        self._has_explored, self._num_evaluated = False, 0
        self._beyond: list[_Beyond] = []

    def bound(self) -> None:
        """Compute bounds of all candidates; reject those over memory, and queue the others."""
        capacity, statistics = self.capacity_bytes, self._statistics
        for table, least_bytes, least_s in self._bounded_tables():
            inside = least_bytes <= (np.inf if capacity is None else capacity)
            self._bounded.append((table.take(inside), least_bytes[inside], least_s[inside]))
            if capacity is not None:
                statistics.rejected["memory"] += int((~inside).sum())
                statistics.in_headroom += int((~inside & (least_bytes <= self._memory_bytes)).sum())
                self._note_beyond(table, least_bytes, least_s, ~inside, capacity)
        self._queue()

    def _queue(self) -> None:
        """Queue the candidates bounded so far."""
        if not self._bounded:
            return
        rows = Candidates.joined([table for table, _, _ in self._bounded])
        least_bytes, least_s = (np.concatenate([bounded[place] for bounded in self._bounded]) for place in (1, 2))
        self._bounded.clear()
        order = np.lexsort((least_s, self._incumbents.goal.first_values(rows.num_devices, least_bytes, least_s)))
        self._rows, self._least_bytes, self._least_s = rows.take(order), least_bytes[order], least_s[order]
        self._left = list(range(len(order)))

    def _bounded_tables(self) -> Iterator[tuple[Candidates, Column, Floats]]:
        """Yield tables of candidates with their bounds in bytes and seconds; workers bound parts of the tables."""
        limit = None if self.capacity_bytes is None else MORE * self.capacity_bytes
        num_bounded, before = 0, self._statistics.rejected_by_rules
        tables = self.enumeration.tables(self._statistics.rejected)
        parts = ((table, rows) for table in tables for rows in table.parts(_PART_ROWS))
        calls = (((table, rows), (self.evaluator, table.take(rows), limit)) for table, rows in parts)
        bounded_parts = self._workers.each(Evaluator.bounded, calls)
        for table, of_table in groupby(bounded_parts, key=lambda part: part[0][0]):
            least_bytes, least_s = np.zeros(len(table), np.int64), np.zeros(len(table))
            for (_, rows), bounded in of_table:
                least_bytes[rows], least_s[rows] = bounded
                num_bounded += len(rows)
                seen = num_bounded + self._statistics.rejected_by_rules - before
                self._told("bounding candidates", seen, self.enumeration.total)
            yield table, least_bytes, least_s * ROUNDING

    def explore(self, *, until_ranked: bool = False) -> None:
        """Evaluate the candidates that are not pruned, most promising first.

        A further call resumes with the others, and after corrections made incumbents slower with the pruned ones.

        Args:
            until_ranked: Stop once there are as many groups of plans as a search with one objective ranks.
        """
        cut: list[int] = []
        until_ranked = until_ranked and len(self._incumbents.goal.objectives) == 1  # so that no later row is cut
        for row in self._hopeful(cut):
            assert self._rows is not None
            self._take(self._rows.plan(row), float(self._least_s[row]), self._numbers(row))
            self._num_evaluated += 1
            self._told("simulating plans", self._num_evaluated, self._most_evaluated(row))
            if until_ranked and self._incumbents.is_full:
                self._left = self._left[bisect_right(self._left, row) :]
                return
        self._left, self._has_explored, self._evaluated = cut, True, None

    def find_any(self) -> None:
        """After an interruption, evaluate a few candidates until one fits.

        Of those bounded so far, the first have the least time of those that need at most half of the memory by their
        bounds. If none are bounded yet, the most sharded meshes come first.
        """
        self._queue()
        for plan, least_s in islice(self._in_haste(), _FEW_IN_HASTE):
            self._take(plan, least_s, self.evaluator.numbers(plan, self.capacity_bytes))
            if self._incumbents.ranked:
                return

    def _in_haste(self) -> Iterator[tuple[ParallelPlan, float]]:
        """Yield plans that are not evaluated yet, with their bounds in seconds."""
        if self._rows is None:
            yield from ((plan, 0.0) for plan in _frugal_first(self.enumeration, self.evaluator, self.capacity_bytes))
            return
        half, seen = (self.capacity_bytes or 0) / 2, set(self._left[: self._num_evaluated])
        for row in np.lexsort((self._least_s, np.maximum(self._least_bytes, half))).tolist():
            if row not in seen:
                yield self._rows.plan(row), float(self._least_s[row])

    def bounded_with(self, name: str, value: Any) -> tuple[Candidates, Column, Floats] | None:
        """Candidates with a value that fit by their bounds, and these bounds in bytes and seconds; None for none."""
        here = np.zeros(0, np.bool_) if self._rows is None else self._rows.has(name, value)
        if self._rows is None or not here.any():
            return None
        return self._rows.take(here), self._least_bytes[here], self._least_s[here]

    def find_misses(self) -> None:
        """Find the near misses among plans that are not pruned by their bounds.

        If a plan was found, near misses are only a hint, so at most 16 plans of unknown memory are evaluated.
        """
        capacity, statistics = self.capacity_bytes, self._statistics
        if capacity is None:
            return
        at_most = _FEW_MISSES if self._incumbents.ranked else _MAX_BEYOND

        def is_hopeless(candidate: _Beyond) -> bool:
            return self._incumbents.is_hopeless(
                candidate.plan.num_devices, capacity + candidate.lacking, candidate.step_time_s
            )

        beyond = [candidate for candidate in sorted(self._beyond) if not is_hopeless(candidate)]
        unknown = islice((candidate for candidate in beyond if not candidate.is_known), at_most)
        asked = takewhile(lambda candidate: not statistics.is_far(candidate.lacking), unknown)
        sizes = self._workers.each(
            Evaluator.numbers, ((candidate, (self.evaluator, candidate.plan, 0)) for candidate in asked)
        )
        for candidate in beyond:
            if statistics.is_far(candidate.lacking):
                break
            size = capacity + candidate.lacking
            if not candidate.is_known:
                if (needed := next(sizes, None)) is None:
                    continue
                size = needed[1][0]
            statistics.missed(
                InfeasiblePlan(size - capacity, candidate.order, candidate.plan, size, options=self.options)
            )

    def _hopeful(self, cut: list[int]) -> Iterator[int]:
        """Yield remaining rows that are not pruned by the incumbents of that time; append pruned rows to ``cut``."""
        deadline_s = np.inf if self.deadline_s is None else self.deadline_s
        incumbents, statistics, rows = self._incumbents, self._statistics, self._left
        one_objective, num_new = len(incumbents.goal.objectives) == 1, int(not self._has_explored)
        for place, row in enumerate(rows):
            least_s = float(self._least_s[row])
            if least_s > deadline_s and (incumbents.ranked or statistics.is_later(least_s - deadline_s)):
                statistics.rejected["max_step_time_s"] += 1
                statistics.bounded -= 1 - num_new
            elif not self._is_hopeless(row):
                statistics.bounded -= 1 - num_new
                yield row
            elif one_objective:  # all later rows are pruned too
                rest = np.array(rows[place:])
                late_rows = self._least_s[rest] > deadline_s
                statistics.rejected["max_step_time_s"] += int(late_rows.sum())
                statistics.bounded += num_new * len(rest) - int(late_rows.sum())
                cut += rest[~late_rows].tolist()
                return
            else:
                statistics.bounded += num_new
                cut.append(row)

    def _take(self, plan: ParallelPlan, least_s: float, numbers: Numbers) -> None:
        """Take in the memory of a plan, and its step time if it fits.

        Args:
            least_s: Lower bound on the step time.
        """
        capacity, deadline_s, statistics = self.capacity_bytes, self.deadline_s, self._statistics
        size, exact_s = numbers
        if exact_s is None:
            assert capacity is not None
            statistics.rejected["memory"] += 1
            statistics.in_headroom += size <= self._memory_bytes
            self._add_beyond([_Beyond(size - capacity, plan_order(plan), plan, least_s, True)])
            if size <= MORE * capacity:
                statistics.almost([self._waiting(plan, size, least_s)])
            return
        step_time_s = rounded(exact_s)
        if deadline_s is not None and step_time_s * ROUNDING > deadline_s:
            late_s = step_time_s - deadline_s
            statistics.too_late(InfeasiblePlan(late_s, plan_order(plan), plan, size, step_time_s, self.options))
        else:
            statistics.timed += 1
            self._incumbents.add(plan, size, step_time_s, self.options)

    def _numbers(self, row: int) -> Numbers:
        """Memory and step time of a row; workers evaluate the next rows meanwhile."""
        if self._evaluated is None:
            self._evaluated = self._workers.each(Evaluator.numbers, self._to_evaluate())
        return next(
            numbers for evaluated, numbers in self._evaluated if evaluated == row
        )  # others were pruned meanwhile

    def _to_evaluate(self) -> Iterator[tuple[int, tuple[Evaluator, ParallelPlan, int | None]]]:
        """Yield remaining rows that are not pruned yet, with the arguments to evaluate them."""
        assert self._rows is not None
        for row in self._left:
            late_s = float(self._least_s[row]) - (np.inf if self.deadline_s is None else self.deadline_s)
            is_late = late_s > 0 and (self._statistics.timed > 0 or self._statistics.is_later(late_s))
            if not is_late and not self._is_hopeless(row):
                yield row, (self.evaluator, self._rows.plan(row), self.capacity_bytes)

    def _most_evaluated(self, row: int) -> int | None:
        """Upper bound on the rows that are evaluated, once ``row`` is; None before any row can be pruned."""
        if not self._incumbents.is_full or len(self._incumbents.goal.objectives) > 1:
            return None
        start = bisect_right(self._left, row)
        return self._num_evaluated + bisect_left(self._left, True, start, key=self._is_hopeless) - start

    def _is_hopeless(self, row: int) -> bool:
        least_bytes, least_s = int(self._least_bytes[row]), float(self._least_s[row])
        return self._incumbents.is_hopeless(self.enumeration.num_devices, least_bytes, least_s)

    def _note_beyond(
        self, table: Candidates, least_bytes: Column, least_s: Floats, outside: NDArray[np.bool_], capacity: int
    ) -> None:
        """Record the plans that lack the fewest bytes, and the fastest plans that may fit with 10% more memory."""
        rows = np.flatnonzero(outside)
        nearest = rows[np.argsort(least_bytes[rows], kind="stable")[:_MAX_BEYOND]]
        plans = [table.plan(row) for row in nearest.tolist()]
        columns = (least_bytes[nearest] - capacity).tolist(), map(plan_order, plans), plans, least_s[nearest].tolist()
        self._add_beyond(_Beyond(*of_plan, False) for of_plan in zip(*columns, strict=True))
        near = rows[least_bytes[rows] <= MORE * capacity]
        fastest = near[np.argsort(least_s[near], kind="stable")[:_MAX_BEYOND]]
        self._statistics.almost(
            self._waiting(table.plan(row), int(least_bytes[row]), float(least_s[row])) for row in fastest.tolist()
        )

    def _add_beyond(self, candidates: Iterable[_Beyond]) -> None:
        self._beyond = heapq.nsmallest(_MAX_BEYOND, [*self._beyond, *candidates])

    def _waiting(self, plan: ParallelPlan, device_bytes: int, least_s: float) -> Waiting:
        value = self._incumbents.goal.values(plan.num_devices, device_bytes, least_s)[0]
        return Waiting(value, least_s, plan_order(plan), plan, self.options)


def first_fit(
    job: Job,
    space: SearchSpace,
    calibration: Calibration | None,
    workers: WorkerPool,
    witness: ParallelPlan | None = None,
    failed: set[ParallelPlan] | None = None,
    on_tried: Callable[[], None] = lambda: None,
) -> ParallelPlan | None:
    """First plan found that violates no rule and fits; None if no plan of the space does.

    Args:
        witness: Plan to try first, usually one that fits a similar job; None for no such plan.
        failed: Plans known not to fit; extended by the plans found not to fit.
        on_tried: Called after each plan that was evaluated.
    """
    failed = set() if failed is None else failed
    enumeration, capacity = Enumeration(space, job), capacity_bytes(job, space)
    evaluator = Evaluator(job, calibration)
    known = [witness] if witness is not None and enumeration.filter.first_violated(witness) is None else []
    plans = (plan for plan in chain(known, _frugal_first(enumeration, evaluator, capacity)) if plan not in failed)
    if capacity is None:
        return next(plans, None)
    for plan, (size, _) in workers.each(Evaluator.numbers, ((plan, (evaluator, plan, 0)) for plan in plans)):
        on_tried()
        if size <= capacity:
            return plan
        failed.add(plan)
    return None


def _frugal_first(enumeration: Enumeration, evaluator: Evaluator, capacity: int | None) -> Iterator[ParallelPlan]:
    """Yield plans that may fit by their bounds, most sharded meshes first."""

    def splits(mesh: Mesh) -> tuple[int, int]:
        return mesh.tp * mesh.pp * mesh.dp_shard * mesh.ep, mesh.tp * mesh.cp

    for mesh in sorted(enumeration.meshes, key=splits, reverse=True):
        for table in enumeration.tables(Counter(), [mesh]):
            least_bytes, _ = evaluator.bounded(table, -1)
            for row in np.argsort(least_bytes, kind="stable").tolist():
                if capacity is not None and least_bytes[row] > capacity:
                    break
                yield table.plan(row)
