"""The search: one job on one or several numbers of devices, its candidates, and the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.rules import BY_NAME
from simplan.search.bounds.common import Bounds
from simplan.search.candidates import FIELDS
from simplan.search.changes import changes
from simplan.search.enumeration import Enumeration, empty_space
from simplan.search.evaluate import Evaluator
from simplan.search.explain import explain_plan, more_memory
from simplan.search.explore import Exploration
from simplan.search.incumbents import Group, Incumbents, Timed
from simplan.search.jobs import capacity_bytes, check_without_plan, with_num_devices
from simplan.search.objective import Goal
from simplan.search.partial import explore_partial, has_partial
from simplan.search.result import Alike, Change, NearestMiss, RankedPlan, SearchExplanation, SearchResult, SpaceCount
from simplan.search.space import SearchSpace, that_it_has
from simplan.search.statistics import ROUNDING, Limits, Miss, Statistics, rounded
from simplan.software.software import SoftwareSpec

__all__ = ["SearchProgress", "search"]

_LIMITS = {"memory": "the worst device must hold it", "max_step_time_s": "a step must be within the deadline"}


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search is.

    Attributes:
        done: Candidates rejected, bounded or timed.
        total: Candidates of the space.
        best_step_time_s: Step time of the best so far; None while there is none.
        so_far: The answer as it would be if the search were stopped now; made when it is asked for, during the call.
        doing: What is done at present.
    """

    done: int
    total: int
    best_step_time_s: float | None
    so_far: Callable[[], SearchResult]
    doing: str = "searching"


def search(
    job: Job,
    space: SearchSpace | None = None,
    *,
    name: str = "search",
    calibration: Calibration | None = None,
    jobs: int = 1,
    explain: bool = True,
    on_progress: Callable[[SearchProgress], None] | None = None,
) -> SearchResult:
    """The best plans of a space, exactly: no plan of the space is better by the model of ``predict``.

    Of plans with as many ranks on every axis, as large microbatches and the same time to a thousandth the simplest is
    shown, and the others are counted (``RankedPlan.alike``): so one that is better by less may be among these.
    Plans that need full recomputation are also tried with as few blocks of every stage as fit (``recompute_layers``):
    the most promising ones, so that of these alone a better one may be missed.
    Layers are split into stages as ``predict`` splits them: as many blocks for each where the software has it so, else
    the contiguous split whose slowest stage is fastest.
    Ctrl-C ends the search with the best so far (``interrupted``).

    Args:
        job: What is asked; its plan has what a search does not vary, and else is not looked at.
        space: The plans to choose from and what makes one better; by default all of the default ranges, by step time.
        name: For people.
        calibration: Timings of this machine, when the cluster is this machine.
        jobs: Processes; -1 for one a core. Under ``joblib.parallel_config`` those of its backend (Dask, Ray).
        explain: Say of the ranked plans what limits them, and what change would make a plan when there is none.
        on_progress: Called often, from this process.

    Raises:
        SpecError: What is asked is wrong whatever the plan, its ranges have no plan between them, or a price cannot be
            had.
    """
    possible = that_it_has(job.software, space or SearchSpace())
    return _Search(name, job, possible, calibration, jobs, on_progress).result(explain=explain)


class _Search:
    """One search: what it is asked, and what it knows so far."""

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
        self._explained: dict[ParallelPlan, SearchExplanation] = {}
        self._confirmed: set[ParallelPlan] = set()
        self._on_progress = on_progress or (lambda _: None)
        sizes = sorted(set(space.num_devices or _default_sizes(space, job)))
        self._jobs = {size: with_num_devices(job, size) for size in sizes}
        for asked in self._jobs.values():
            check_without_plan(asked, space)
        enumerations = {size: Enumeration(space, asked) for size, asked in self._jobs.items()}
        goal = Goal.of(space, job)
        if "cost" in space.goals and job.model.sample == "image":
            rule = "is the price of a number of tokens, and the model is one of images"
            raise SpecError(Problem(field="search.objective", value="cost", rule=rule, fix="use step_time"))
        self._incumbents, self._statistics = Incumbents(goal, space.top), Statistics()
        self._num_partial = 0
        self._total = sum(enumeration.total for enumeration in enumerations.values())
        if not self._total:
            raise SpecError(empty_space(space, software=job.software, enumerations=enumerations))
        self._bounds = {size: Bounds(asked, calibration) for size, asked in self._jobs.items()}
        self._evaluators = {size: Evaluator(asked, calibration, jobs) for size, asked in self._jobs.items()}
        self._limits = {
            size: Limits(capacity_bytes(asked, space), space.max_step_time_s) for size, asked in self._jobs.items()
        }
        self._explorations = {
            size: Exploration(
                enumerations[size],
                self._bounds[size],
                self._evaluators[size],
                self._limits[size],
                self._incumbents,
                self._statistics,
                lambda *_: self._tell(),
            )
            for size in self._jobs
        }

    def result(self, *, explain: bool) -> SearchResult:
        try:
            for exploration in self._explorations.values():
                exploration.bound()
                exploration.explore()
            for size in self._jobs:
                self._explore_partial(size)
            while self._confirm():
                for exploration in self._explorations.values():
                    exploration.explore()
            for exploration in self._explorations.values():
                exploration.find_misses()
            self._tell()
            if explain:
                self._explain()
        except KeyboardInterrupt:
            return self._answer(interrupted=True)
        found = self._answer(interrupted=False)
        if explain and not found.ranked:
            return replace(found, changes=self._changes(found.nearest_misses))
        return found

    def _confirm(self) -> bool:
        """Gives what is ranked or on the front the numbers of ``predict``; whether any plan had others before.

        Those of truncated steps are no larger, so what is not kept by them is not kept by these either.
        """
        changed = False
        while unknown := [timed for timed in self._incumbents.shown if timed.plan not in self._confirmed]:
            for timed in unknown:
                self._confirmed.add(timed.plan)
                evaluator, limits = self._evaluators[timed.num_devices], self._limits[timed.num_devices]
                if not evaluator.is_approximate(timed.plan):
                    continue
                [(size, exact_s)] = evaluator.numbers([timed.plan], limits.device_bytes, whole=True)
                numbers = None if exact_s is None else (size, rounded(exact_s))
                if numbers == (timed.device_bytes, timed.step_time_s):
                    continue
                changed = True
                late = numbers is not None and numbers[1] * ROUNDING > (limits.step_time_s or math.inf)
                self._incumbents.correct(timed.plan, None if late else numbers)
                if (numbers is None or late) and timed.plan.recompute_layers is None:
                    self._statistics.timed -= 1
                    self._statistics.rejected["max_step_time_s" if late else "memory"] += 1
            self._tell("predicting the best plans")
        return changed

    def _answer(self, *, interrupted: bool) -> SearchResult:
        """What is known now; an interrupted search counts what was looked at."""
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
                {name: _in_words(name, job.software) for name, number in counts.rejected.items() if number},
                self._num_partial,
            ),
            nearest_misses=self._misses(),
            interrupted=interrupted,
            unit="images" if job.model.sample == "image" else "tokens",
            inputs={
                "model": job.model.model_dump(mode="json"),
                "cluster": job.cluster.model_dump(mode="json"),
                "training": job.training.model_dump(mode="json"),
                "software": job.software.id,
                "search": self._space.model_dump(mode="json", exclude_none=True),
            },
        )

    def _explore_partial(self, size: int) -> None:
        job = self._jobs[size]
        if has_partial(job, self._space, self._calibration):
            self._num_partial += explore_partial(
                job,
                self._space,
                self._bounds[size],
                self._evaluators[size],
                self._limits[size],
                self._incumbents,
                lambda *_: self._tell("looking for how few blocks may run again"),
                self._statistics,
            )

    def _tell(self, doing: str = "searching") -> None:
        ranked, done = self._incumbents.ranked, self._statistics.done
        best = ranked[0].step_time_s if ranked else None
        self._on_progress(SearchProgress(done, self._total, best, lambda: self._answer(interrupted=True), doing))

    def _explain(self) -> None:
        ranked = self._incumbents.ranked
        for rank, timed in enumerate(ranked):
            self._tell(f"explaining plan {rank + 1} of {len(ranked)}")
            job = self._jobs[timed.num_devices].with_plan(timed.plan)
            why = explain_plan(self._name, job, self._calibration)
            if rank == 0 and len(self._jobs) == 1:
                capacity = self._limits[timed.num_devices].device_bytes
                evaluator = self._evaluators[timed.num_devices]
                nearly = self._statistics.nearly
                share = 0.0 if capacity is None else more_memory(evaluator, timed.step_time_s, nearly, capacity)
                why = replace(why, saved={**why.saved, **({"memory": share} if share > 0 else {})})
            self._explained[timed.plan] = why

    def _changes(self, misses: tuple[NearestMiss, ...]) -> tuple[Change, ...]:
        self._tell("looking for what would make a plan")
        return changes(self._job, self._space, misses, self._calibration)

    def _plan(self, timed: Timed) -> RankedPlan:
        capacity, goal = self._limits[timed.num_devices].device_bytes, self._incumbents.goal
        return RankedPlan(
            plan=timed.plan,
            num_devices=timed.num_devices,
            step_time_s=timed.step_time_s,
            device_bytes=timed.device_bytes,
            headroom_bytes=None if capacity is None else capacity - timed.device_bytes,
            tokens_per_s_per_device=goal.tokens_per_s_per_device(timed.num_devices, timed.step_time_s),
            cost_dollars=goal.cost_dollars(timed.num_devices, timed.step_time_s),
            explanation=self._explained.get(timed.plan),
            alike=next((_alike(group) for group in self._incumbents.groups if group.shown == timed), Alike()),
        )

    def _misses(self) -> tuple[NearestMiss, ...]:
        """What lacks memory; where nothing is within the deadline and something fits, what lacks time."""
        late = not self._incumbents.ranked and bool(self._statistics.late)

        def told(miss: Miss) -> NearestMiss:
            return NearestMiss(
                plan=miss.plan,
                num_devices=miss.plan.num_devices,
                device_bytes=miss.device_bytes,
                lacking_bytes=None if late else int(miss.lacking),
                step_time_s=miss.step_time_s,
                lacking_s=miss.lacking if late else None,
            )

        return tuple(told(miss) for miss in (self._statistics.late if late else self._statistics.misses))


def _alike(group: Group) -> Alike:
    """What the others of a group have that the one that is shown has not."""
    names = (*FIELDS, "recompute_layers")
    shown, *others = ({name: getattr(timed.plan, name) for name in names} for timed in (group.shown, *group.others))
    found = {key: {other[key] for other in others} - {value} for key, value in shown.items()}
    return Alike(len(others), {key: tuple(sorted(values, key=_order)) for key, values in found.items() if values})


def _in_words(name: str, software: SoftwareSpec) -> str:
    """What rejected candidates, a rule or a limit of the search, in one sentence."""
    return _LIMITS.get(name) or BY_NAME[name].in_words(software)


def _order(value: Any) -> tuple[bool, Any]:
    """None, which is all blocks, is last."""
    return value is None, value or 0 if not isinstance(value, str) else value


def _default_sizes(space: SearchSpace, job: Job) -> list[int]:
    """The cluster's devices; where their number is an objective, also its halves down to one device."""
    most = job.cluster.num_devices
    if "num_devices" not in space.goals:
        return [most]
    sizes = [most]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes
