"""Entry point of the search: one job, on one or several device counts, to a ``SearchResult``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, product
from typing import Any

from simplan.cluster.topology import topology_problems
from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict.step import jobs_of_seeds, predict
from simplan.problems import parse_model
from simplan.rules import BY_NAME
from simplan.search.candidates import FIELDS
from simplan.search.changes import changes
from simplan.search.enumeration import empty_space, unsearched
from simplan.search.evaluation.evaluator import Evaluator
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.explain import explain_plan, more_memory
from simplan.search.explore import Exploration
from simplan.search.incumbents import Goal, Group, Incumbents, Timed
from simplan.search.partial_recompute import search_partial_recompute
from simplan.search.progress import PhaseClock, SearchProgress
from simplan.search.result import (
    EquivalentPlans,
    NearestMiss,
    RankedPlan,
    RequestChange,
    SearchExplanation,
    SearchResult,
    SpaceCount,
)
from simplan.search.space import (
    SearchedOptions,
    SearchSpace,
    check_without_plan,
    searched_options,
    that_it_has,
    with_options,
)
from simplan.search.statistics import ROUNDING, InfeasiblePlan, Statistics, rounded
from simplan.search.ways import with_ways

_LIMITS = {"memory": "the worst device must hold it", "max_step_time_s": "a step must be within the deadline"}


def search(
    job: Job,
    space: SearchSpace | Mapping[str, Any] | None = None,
    *,
    name: str = "search",
    calibration: Calibration | None = None,
    jobs: int = 1,
    explain: bool = True,
    on_progress: Callable[[SearchProgress], None] | None = None,
) -> SearchResult:
    """Find the best plans of a space, exactly: by ``predict``, no plan of the space is better.

    Equivalent plans have the same parallel degrees and microbatch size, and step times within 0.1%. Each group shows
    its simplest plan and counts the others (``RankedPlan.alike``). One of the others may be faster by less than 0.1%.

    Plans that fit only with full recomputation are also tried with the fewest recomputed blocks per stage that fit
    (``recompute_layers``). Only the most promising ones are tried, so this part of the search is not exhaustive.

    Ways to train that change the mathematics (``SearchSpace.replication`` and ``compression``) are searched one after
    the other, and ranked among the other plans only with a number of samples that they need (``samples_factor``).

    Layers are split into stages as in ``predict``: equal blocks per stage where the software requires it, else the
    contiguous split with the fastest slowest stage.

    Ctrl-C ends the search and returns the best plans so far (``interrupted``); before the first plan that fits, a few
    candidates are evaluated to find one. A second Ctrl-C stops that, too.

    Args:
        job: The job. Its plan supplies the fields that a search does not vary; the other plan fields are ignored.
        space: Ranges and objective, also as a mapping such as ``{"tp": [1, 2]}``; None for the default ranges, ranked
            by step time.
        name: Display name.
        calibration: Timings of this machine; only when the cluster is this machine.
        jobs: Worker processes; -1 for one per core. Under ``joblib.parallel_config``, workers of that backend (Dask,
            Ray).
        explain: Report bottleneck and sensitivities of ranked plans, and feasible changes when no plan fits.
        on_progress: Called after every evaluated plan, in this process.

    Raises:
        SpecError: The job is invalid for every plan, the ranges have no plan in common, or cost is not available as an
            objective.
    """
    parsed = (
        space if isinstance(space, SearchSpace) else parse_model(SearchSpace, dict(space or {}), prefix=("search",))
    )
    possible = that_it_has(job.software, parsed)

    def search_one(asked: Job, within: SearchSpace) -> SearchResult:
        return _Search(name, jobs_of_seeds(asked)[0], within, calibration, jobs, on_progress).result(explain=explain)

    result = search_one(job, possible)
    asks = possible.replication or possible.compression
    return with_ways(result, job, possible, search_one) if asks and not result.interrupted else result


class _Search:
    """State of one search: the request, and the results so far."""

    def __init__(
        self,
        name: str,
        job: Job,
        space: SearchSpace,
        calibration: Calibration | None,
        jobs: int,
        on_progress: Callable[[SearchProgress], None] | None,
    ) -> None:
        self._name, self._job, self._space, self._calibration = name, job, space, calibration
        self._explained: dict[tuple[ParallelPlan, SearchedOptions], SearchExplanation] = {}
        self._confirmed: set[tuple[ParallelPlan, SearchedOptions]] = set()
        self._workers, self._clock = WorkerPool(jobs), PhaseClock()
        self._on_progress = on_progress or (lambda _: None)
        sizes = sorted(set(space.num_devices or _default_sizes(space, job)))
        candidates = {
            (size, options): with_options(job, options).with_num_devices(size)
            for size, options in product(sizes, searched_options(space))
        }
        for asked in candidates.values():
            check_without_plan(asked, space)
        if "cost" in space.goals and job.model.sample != "sequence":
            rule = "is the price of a number of tokens, and the model has no tokens"
            raise SpecError(Problem(field="search.objective", value="cost", rule=rule, fix="use step_time"))
        self._incumbents, self._statistics = Incumbents(Goal.of(space, job), space.top), Statistics()
        self._num_partial = 0
        self._explorations = {
            (size, options): Exploration(
                asked, space, calibration, self._workers, self._incumbents, self._statistics, self._tell, options
            )
            for (size, options), asked in candidates.items()
        }
        enumerations = [exploration.enumeration for exploration in self._explorations.values()]
        self._total = sum(enumeration.total for enumeration in enumerations)
        self._unsearched = unsearched(space, next(iter(candidates.values())))
        if not self._total:
            raise SpecError(empty_space(space, job.software, enumerations))

    def result(self, *, explain: bool) -> SearchResult:
        try:
            with self._workers:
                self._find()
                if explain:
                    self._explain()
                result = self._answer(interrupted=False)
                if explain and not result.ranked:
                    self._tell("looking for what would make a plan")
                    result = replace(result, changes=self._changes(result.nearest_misses))
                return result
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                self._find_any()
            return self._answer(interrupted=True)

    def _find_any(self) -> None:
        """Find a plan that fits for a search that was interrupted before it had one."""
        for exploration in self._explorations.values():
            if not self._incumbents.ranked:
                exploration.find_any()

    def _find(self) -> None:
        """Find the ranked plans, and the near misses."""
        explorations = self._explorations.values()
        for exploration in explorations:
            exploration.bound()
            exploration.explore(until_ranked=True)
        for exploration in explorations:  # early: they are often best, and prune many other plans
            self._num_partial += search_partial_recompute(
                exploration, self._space, self._calibration, self._incumbents, self._workers, self._tell
            )
        changed = True
        while changed:
            for exploration in explorations:
                exploration.explore()
            changed = self._confirm()
        for exploration in explorations:
            exploration.find_misses()
        self._tell("all candidates are done")

    def _changes(self, misses: tuple[NearestMiss, ...]) -> tuple[RequestChange, ...]:
        """Changes that make a plan feasible, with the software options of the nearest miss."""
        software = misses[0].software if misses else dict(searched_options(self._space)[0])
        job = with_options(self._job, tuple(software.items()))
        alike = tuple(miss for miss in misses if miss.software == software)
        numbers = count(1)

        def told() -> None:
            self._tell("looking for what would make a plan", next(numbers))

        tried = changes(job, self._space, alike, self._calibration, self._workers, told)
        return tuple(replace(change, software=software) for change in tried)

    def _confirm(self) -> bool:
        """Replace numbers of truncated steps by those of ``predict`` for ranked plans and the front.

        Truncated steps never overestimate, so a plan that they exclude stays excluded.

        Returns:
            True if the numbers of any plan changed.
        """
        changed = False
        while unknown := [timed for timed in self._incumbents.shown if timed.key not in self._confirmed]:
            self._confirmed.update(timed.key for timed in unknown)
            asked = [(timed, self._explorations[timed.num_devices, timed.options]) for timed in unknown]
            calls = [
                (timed, (exploration.evaluator, timed.plan, exploration.capacity_bytes))
                for timed, exploration in asked
                if exploration.evaluator.is_approximate(timed.plan)
            ]
            whole = self._workers.each(partial(Evaluator.numbers, whole=True), calls)
            for number, (timed, (size, exact_s)) in enumerate(whole, 1):
                self._tell("predicting the best plans", number, len(calls))
                numbers = None if exact_s is None else (size, rounded(exact_s))
                if numbers == (timed.device_bytes, timed.step_time_s):
                    continue
                changed = True
                late = numbers is not None and numbers[1] * ROUNDING > (self._space.max_step_time_s or math.inf)
                self._incumbents.correct(timed.plan, None if late else numbers, timed.options)
                if (numbers is None or late) and timed.plan.recompute_layers is None:
                    self._statistics.timed -= 1
                    self._statistics.rejected["max_step_time_s" if late else "memory"] += 1
        return changed

    def _answer(self, *, interrupted: bool) -> SearchResult:
        """Current result; an interrupted search counts only the evaluated candidates."""
        counts, job = self._statistics, self._job
        return SearchResult(
            name=self._name,
            objectives=self._space.goals,
            ranked=tuple(self._plan(timed) for timed in self._incumbents.ranked),
            pareto=tuple(self._plan(timed) for timed in self._incumbents.front),
            space=SpaceCount(
                self._total if not interrupted else counts.done,
                {rule: number for rule, number in counts.rejected.most_common() if number},
                counts.bounded,
                counts.timed,
                {
                    name: _LIMITS.get(name) or BY_NAME[name].in_words(job.software)
                    for name, number in counts.rejected.items()
                    if number
                },
                self._num_partial,
                counts.in_headroom,
            ),
            max_memory_fraction=self._space.max_memory_fraction,
            nearest_misses=self._misses(),
            interrupted=interrupted,
            unsearched=self._unsearched,
            unit="tokens" if job.model.sample == "sequence" else f"{job.model.sample}s",
            links=job.cluster.links,
            inputs={
                "model": job.model.model_dump(mode="json"),
                "cluster": job.cluster.model_dump(mode="json"),
                "training": job.training.model_dump(mode="json"),
                "software": job.software.id,
                "search": self._space.model_dump(mode="json", exclude_none=True),
            },
        )

    def _tell(self, phase: str, number: int = 0, of: int | None = None) -> None:
        """Report the progress; ``number`` parts of a phase are done, of at most ``of``."""
        ranked, done = self._incumbents.ranked, self._statistics.done
        best = ranked[0].step_time_s if ranked else None
        doing = "searching" if done < self._total else phase
        so_far = partial(self._answer, interrupted=True)
        phase_now = self._clock.phase(phase, number, of)
        self._on_progress(SearchProgress(done, self._total, best, so_far, doing, phase_now))

    def _explain(self) -> None:
        ranked = self._incumbents.ranked
        evaluators = {options: explored.evaluator for (_, options), explored in self._explorations.items()}
        calls = []
        for timed in ranked:
            exploration = self._explorations[timed.num_devices, timed.options]
            others = [options for options in evaluators if len(set(options) - set(timed.options)) == 1]
            calls.append((timed, (exploration.evaluator, timed.plan, others, exploration.capacity_bytes)))
        explained = self._workers.each(explain_plan, calls)
        for rank in range(len(ranked)):
            self._tell(f"explaining plan {rank + 1} of {len(ranked)}")
            timed, why = next(explained)
            capacity = self._explorations[timed.num_devices, timed.options].capacity_bytes
            if rank == 0 and len(evaluators) == len(self._explorations) and capacity is not None:
                nearly = self._statistics.nearly
                share = more_memory(evaluators, timed.step_time_s, nearly, capacity, self._workers)
                if share > 0:
                    why = replace(why, saved={**(why.saved or {}), "memory": share})
            self._explained[timed.key] = why

    def _plan(self, timed: Timed) -> RankedPlan:
        capacity, goal = self._explorations[timed.num_devices, timed.options].capacity_bytes, self._incumbents.goal
        device_bytes, why = timed.device_bytes, self._explained.get(timed.key)
        if self._job.cluster.is_mixed and why is not None and why.worst_capacity_bytes is not None:
            # bytes of ranks on smaller devices were compared as fractions of the largest device
            device_bytes = why.worst_bytes
            capacity = int(why.worst_capacity_bytes * self._space.max_memory_fraction)
        return RankedPlan(
            plan=timed.plan,
            software=dict(timed.options),
            num_devices=timed.num_devices,
            step_time_s=timed.step_time_s,
            device_bytes=device_bytes,
            headroom_bytes=None if capacity is None else capacity - device_bytes,
            tokens_per_s_per_device=goal.tokens_per_s_per_device(timed.num_devices, timed.step_time_s),
            cost_dollars=goal.cost_dollars(timed.num_devices, timed.step_time_s),
            explanation=why,
            alike=next((_alike(group) for group in self._incumbents.groups if group.shown == timed), EquivalentPlans()),
        )

    def _misses(self) -> tuple[NearestMiss, ...]:
        """Nearest misses: over memory, or over the deadline if plans fit but none meets the deadline."""
        late = not self._incumbents.ranked and bool(self._statistics.late)
        return tuple(
            NearestMiss(
                plan=miss.plan,
                software=dict(miss.options),
                num_devices=miss.plan.num_devices,
                device_bytes=miss.device_bytes,
                lacking_bytes=None if late else int(miss.lacking),
                step_time_s=miss.step_time_s,
                lacking_s=miss.lacking if late else None,
            )
            for miss in (self._statistics.late if late else self._statistics.misses)
            if late or not self._lacks_host_memory(miss)
        )

    def _lacks_host_memory(self, miss: InfeasiblePlan) -> bool:
        """True if a plan offloads more than hosts hold; no larger device would help it."""
        plan = miss.plan
        if self._job.cluster.host_memory_bytes is None or not (plan.offload_optimizer or plan.offload_activations):
            return False
        job = with_options(self._job, miss.options).with_num_devices(plan.num_devices).with_plan(plan)
        return predict(job, calibration=self._calibration).host_fits is False


def _alike(group: Group) -> EquivalentPlans:
    """Number of other plans in a group, and their field values that differ from the shown plan."""
    names = (*FIELDS, "recompute_layers")
    shown, *others = ({name: getattr(timed.plan, name) for name in names} for timed in (group.shown, *group.others))
    differing = {key: {other[key] for other in others} - {value} for key, value in shown.items()}
    return EquivalentPlans(
        len(others), {key: tuple(sorted(values, key=_order)) for key, values in differing.items() if values}
    )


def _order(value: Any) -> tuple[bool, Any]:
    """Sort key of a field value; None (all blocks) sorts last."""
    return value is None, value or 0 if not isinstance(value, str) else value


def _default_sizes(space: SearchSpace, job: Job) -> list[int]:
    """Device counts to search: the cluster's; with ``num_devices`` as objective, also repeated halves of it.

    Halves that the cluster's topology cannot have, such as those of a torus with a shape, are left out.
    """
    all_devices = job.cluster.num_devices
    if "num_devices" not in space.goals:
        return [all_devices]
    sizes = [all_devices]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return [size for size in sizes if size == all_devices or not topology_problems(job.with_num_devices(size).cluster)]
