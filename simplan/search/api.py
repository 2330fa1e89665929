"""The search: questions of one or several sizes, their candidates, and the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from simplan.cost.calibration import Calibration
from simplan.errors import Problem, SpecError
from simplan.search.best_first import explore_best_first
from simplan.search.changes import changes
from simplan.search.enumeration import Enumeration
from simplan.search.evaluator import Evaluator
from simplan.search.explain import explain_candidate, more_memory
from simplan.search.feasible import capacity_bytes
from simplan.search.keep import Group, Keep, Timed
from simplan.search.modules import check_modules
from simplan.search.nothing import nothing_to_compare
from simplan.search.objective import Goal
from simplan.search.partial import explore_partial, has_partial
from simplan.search.question import Question
from simplan.search.result import Alike, Change, Explanation, NearestMiss, RankedPlan, SearchResult, SpaceCount
from simplan.search.rules import in_words
from simplan.search.space import SearchSpace, that_it_has
from simplan.search.tally import Limits, Miss, Tally
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Progress", "search"]


@dataclass(frozen=True, slots=True)
class Progress:
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
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    software: SoftwareSpec,
    space: SearchSpace | None = None,
    *,
    name: str = "search",
    calibration: Calibration | None = None,
    jobs: int = 1,
    explain: bool = True,
    soon: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
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
        model, cluster, training, software: What is asked.
        space: The plans to choose from and what makes one better; by default all of the default ranges, by step time.
        name: For people.
        calibration: Timings of this machine, when the cluster is this machine.
        jobs: Processes; -1 for one a core. Under ``joblib.parallel_config`` those of its backend (Dask, Ray).
        explain: Say of the ranked plans what limits them, and what change would make a plan when there is none.
        soon: Time a few promising plans now and then before all are looked at, for those who watch. The best are the
            same; how many plans are bounded instead of timed then depends on the speed of the machine.
        on_progress: Called often, from this process.

    Raises:
        SpecError: What is asked is wrong whatever the plan, its ranges have no plan between them, or a price cannot be
            had.
    """
    question = Question(model, cluster, training, software, calibration)
    possible = that_it_has(software, space or SearchSpace())
    return _Search(name, question, possible, jobs, soon, on_progress).result(explain=explain)


class _Search:
    """One search: what it is asked, and what it knows so far."""

    def __init__(
        self,
        name: str,
        question: Question,
        space: SearchSpace,
        jobs: int,
        soon: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._name, self._space, self._jobs, self._soon = name, space, jobs, soon
        self._explained: dict[Timed, Explanation] = {}
        self._evaluators: dict[int, Evaluator] = {}
        self._on_progress = on_progress or (lambda _: None)
        sizes = sorted(set(space.num_devices or _default_sizes(space, question)))
        self._questions = {size: question.with_devices(size) for size in sizes}
        for asked in self._questions.values():
            asked.check()
        check_modules(question, space)
        self._question = question
        self._enumerations = {size: Enumeration(space, asked) for size, asked in self._questions.items()}
        self._goal = Goal.of(space, question)
        if "cost" in space.goals and question.model.sample == "image":
            rule = "is the price of a number of tokens, and the model is one of images"
            raise SpecError(Problem(field="search.objective", value="cost", rule=rule, fix="use step_time"))
        self._keep, self._tally, self._some_blocks = Keep(self._goal, space.top), Tally(), 0
        self._total = sum(enumeration.total for enumeration in self._enumerations.values())
        if not self._total:
            raise SpecError(nothing_to_compare(space, software=question.software, enumerations=self._enumerations))

    def result(self, *, explain: bool) -> SearchResult:
        try:
            for size in self._questions:
                self._explore(size)
            for size in self._questions:
                self._explore_partial(size)
            if explain:
                self._explain()
        except KeyboardInterrupt:
            return self._answer(interrupted=True)
        found = self._answer(interrupted=False)
        if explain and not found.ranked:
            return replace(found, changes=self._changes(found.nearest_misses))
        return found

    def _answer(self, *, interrupted: bool) -> SearchResult:
        """What is known now; an interrupted search counts what was looked at."""
        counts, asked = self._tally, self._question
        return SearchResult(
            name=self._name,
            objectives=self._space.goals,
            ranked=tuple(self._plan(timed) for timed in self._keep.ranked),
            pareto=tuple(self._plan(timed) for timed in self._keep.front),
            space=SpaceCount(
                self._total if not interrupted else counts.done,
                {rule: number for rule, number in counts.rejected.most_common() if number},
                counts.bounded,
                counts.timed,
                {rule: in_words(rule, asked.software) for rule, number in counts.rejected.items() if number},
                self._some_blocks,
            ),
            nearest_misses=self._misses(),
            interrupted=interrupted,
            unit="images" if asked.model.sample == "image" else "tokens",
            inputs={
                "model": asked.model.model_dump(mode="json"),
                "cluster": asked.cluster.model_dump(mode="json"),
                "training": asked.training.model_dump(mode="json"),
                "software": asked.software.id,
                "search": self._space.model_dump(mode="json", exclude_none=True),
            },
        )

    def _explore(self, size: int) -> None:
        question, enumeration = self._questions[size], self._enumerations[size]
        limits = Limits(capacity_bytes(question, self._space), self._space.max_step_time_s)

        def told(tally: Tally, keep: Keep) -> None:
            self._tell(tally, keep)

        evaluator = self._evaluator(size)
        where = enumeration, enumeration.meshes
        explore_best_first(*where, evaluator, limits, self._keep, self._tally, told, soon=self._soon)

    def _evaluator(self, size: int) -> Evaluator:
        if size not in self._evaluators:
            self._evaluators[size] = Evaluator(self._questions[size], self._jobs)
        return self._evaluators[size]

    def _explore_partial(self, size: int) -> None:
        question = self._questions[size]
        if has_partial(question, self._space):
            limits = Limits(capacity_bytes(question, self._space), self._space.max_step_time_s)

            def told(tally: Tally, keep: Keep) -> None:
                self._tell(tally, keep, "looking for how few blocks may run again")

            evaluator = self._evaluator(size)
            self._some_blocks += explore_partial(
                question, self._space, evaluator, limits, self._keep, self._tally, told
            )

    def _tell(self, tally: Tally, keep: Keep, doing: str = "searching") -> None:
        best = keep.ranked[0].step_time_s if keep.ranked else None
        self._on_progress(Progress(tally.done, self._total, best, lambda: self._answer(interrupted=True), doing))

    def _explain(self) -> None:
        for rank, timed in enumerate(self._keep.ranked):
            self._tell(self._tally, self._keep, f"explaining plan {rank + 1} of {len(self._keep.ranked)}")
            question = self._questions[timed.num_devices]
            why = explain_candidate(self._name, question, timed)
            if rank == 0 and len(self._questions) == 1:
                capacity = capacity_bytes(question, self._space)
                share = 0.0 if capacity is None else more_memory(question, timed, self._tally.nearly, capacity)
                why = replace(why, saved={**why.saved, **({"memory": share} if share > 0 else {})})
            self._explained[timed] = why

    def _changes(self, misses: tuple[NearestMiss, ...]) -> tuple[Change, ...]:
        self._tell(self._tally, self._keep, "looking for what would make a plan")
        return changes(self._question, self._space, misses)

    def _plan(self, timed: Timed) -> RankedPlan:
        capacity = capacity_bytes(self._questions[timed.num_devices], self._space)
        return RankedPlan(
            plan=timed.candidate.plan(),
            num_devices=timed.num_devices,
            step_time_s=timed.step_time_s,
            device_bytes=timed.device_bytes,
            headroom_bytes=None if capacity is None else capacity - timed.device_bytes,
            tokens_per_s_per_device=self._goal.tokens_per_s_per_device(timed.num_devices, timed.step_time_s),
            cost_dollars=self._goal.cost_dollars(timed.num_devices, timed.step_time_s),
            explanation=self._explained.get(timed),
            alike=next((_alike(group) for group in self._keep.groups if group.shown == timed), Alike()),
        )

    def _misses(self) -> tuple[NearestMiss, ...]:
        """What lacks memory; where nothing is within the deadline and something fits, what lacks time."""
        late = not self._keep.ranked and bool(self._tally.late)

        def told(miss: Miss) -> NearestMiss:
            return NearestMiss(
                plan=miss.candidate.plan(),
                num_devices=miss.candidate.num_devices,
                device_bytes=miss.device_bytes,
                lacking_bytes=None if late else int(miss.lacking),
                step_time_s=miss.step_time_s,
                lacking_s=miss.lacking if late else None,
            )

        return tuple(told(miss) for miss in (self._tally.late if late else self._tally.misses))


def _alike(group: Group) -> Alike:
    """What the others of a group have that the one that is shown has not."""
    shown, *others = (timed.candidate.keys() for timed in (group.shown, *group.others))
    found = {key: {other[key] for other in others} - {value} for key, value in shown.items()}
    return Alike(len(others), {key: tuple(sorted(values, key=_order)) for key, values in found.items() if values})


def _order(value: Any) -> tuple[bool, Any]:
    """None, which is all blocks, is last."""
    return value is None, value or 0 if not isinstance(value, str) else value


def _default_sizes(space: SearchSpace, question: Question) -> list[int]:
    """The cluster's devices; where their number is an objective, also its halves down to one device."""
    most = question.cluster.num_devices
    if "num_devices" not in space.goals:
        return [most]
    sizes = [most]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes
