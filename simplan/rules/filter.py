"""Checks the rules for hundreds of thousands of plans of one job, in steps, as soon as plan fields are known.

An enumeration decides fields in steps, e.g. the mesh, then the schedule, then the microbatch size. ``stages`` returns
one function per step, which names the first rule that the known fields violate. A step checks the rules that read its
fields and otherwise only fields of earlier steps. Fields in no step have the values of the job's plan.

>>> from simplan import catalog
>>> from simplan.plan.plan import ParallelPlan
>>> from simplan.training import TrainingSpec
>>> training, cluster = TrainingSpec(global_batch_size=32), catalog.cluster("dgx-h100", 8)
>>> job = Job(catalog.model("gpt2-124m"), cluster, training, ParallelPlan(), catalog.software("torch"))
>>> mesh, pipeline, batch = PlanFilter(job).stages("dp_replicate pp", "schedule", "microbatch_size")
>>> mesh((2, 4)), mesh((3, 4))
(None, 'devices')
>>> pipeline((2, 4, "1f1b")), pipeline((2, 4, "none")), pipeline((2, 4, "zb-h1"))
(None, 'schedule_goes_with_pipeline', 'split_backward_ddp')
>>> batch((2, 4, "1f1b", 16)), batch((2, 4, "1f1b", 3))
(None, 'batch_divides')

Every rule is evaluated once per combination of values of its fields; the result is cached in a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.rules.book import RULES
from simplan.rules.rule import Rule


class PlanFilter:
    """The rules for plans of one job.

    Args:
        job: The job; enumerated fields of its plan are ignored.
        rules: In the order in which they are named where several are violated.
    """

    def __init__(self, job: Job, rules: Sequence[Rule] = RULES) -> None:
        self._job, self._rules = job, tuple(rules)
        self._fixed = {name: getattr(job.plan, name) for name in ParallelPlan.model_fields}
        self._whole: FilterStage | None = None

    def stages(self, *steps: str) -> list[FilterStage]:
        """One function for each step.

        Rules that read no field of any step are checked in the first step. Rules with ``after_others`` are checked in
        the last step.

        Args:
            steps: Per step, names of the fields that become known, separated by spaces.
        """
        fields = " ".join(steps).split()
        assert sorted(fields) == sorted({*fields} & {*self._fixed}), fields
        made, asked, known = [], set[str](), 0
        for number, step in enumerate(steps, 1):
            known += len(step.split())
            now = [
                (place, rule)
                for place, rule in enumerate(self._rules)
                if rule.name not in asked
                and rule.reads & set(fields) <= set(fields[:known])
                and (number == len(steps) or not rule.after_others)
            ]
            asked |= {rule.name for _, rule in now}
            made.append(FilterStage(now, fields, self._job, self._fixed))
        return made

    def first_violated(self, plan: ParallelPlan) -> str | None:
        """The name of the first rule that a whole plan violates; None when it violates none."""
        if self._whole is None:
            [self._whole] = self.stages(" ".join(self._fixed))
        return self._whole(tuple(getattr(plan, name) for name in self._fixed))


class FilterStage:
    """Rules of one step, grouped by the fields that they read.

    Args:
        rules: Rules of the step, each with its index in the order of all rules.
        fields: Names of the fields of all steps, in the order of the values.
        fixed: Values of all plan fields; those in ``fields`` are overridden.
    """

    __slots__ = ("_groups", "_last", "_names", "reads")

    def __init__(
        self, rules: Sequence[tuple[int, Rule]], fields: Sequence[str], job: Job, fixed: Mapping[str, Any]
    ) -> None:
        self._names = {place: rule.name for place, rule in rules}
        self.reads = {field for _, rule in rules for field in rule.reads}
        by_reads: dict[tuple[bool, tuple[int, ...]], list[tuple[int, Rule]]] = {}
        for place, rule in rules:
            read = tuple(index for index, field in enumerate(fields) if field in rule.reads)
            by_reads.setdefault((rule.after_others, read), []).append((place, rule))
        groups: dict[bool, list[_Group]] = {False: [], True: []}
        for (last, read), of_group in by_reads.items():
            names = [fields[index] for index in read]
            getter = itemgetter(*read) if read else lambda _: ()
            groups[last].append((getter, _checking(of_group, names, job, fixed)))
        self._groups, self._last = groups[False], groups[True]

    def __call__(self, values: Sequence[Any]) -> str | None:
        """The name of the first rule that is violated.

        Args:
            values: Values of the fields known so far, in the order of the steps; None for unset fields.
        """
        place = _first(self._groups, values)
        if place is None and self._last:
            place = _first(self._last, values)
        return None if place is None else self._names[place]


_Group = tuple[Callable[[Sequence[Any]], Hashable], Callable[[Hashable], int | None]]
"""Per group: getter of the values that its rules read (a tuple, or the only one), and check of the rules."""


def _first(groups: Sequence[_Group], values: Sequence[Any]) -> int | None:
    places = [place for getter, check in groups if (place := check(getter(values))) is not None]
    return min(places, default=None)


def _checking(
    rules: Sequence[tuple[int, Rule]], names: Sequence[str], job: Job, fixed: Mapping[str, Any]
) -> Callable[[Hashable], int | None]:
    """Cached check of rules that read the same fields: the index of the first violated one, or None."""

    @cache
    def check(key: Any) -> int | None:
        values = dict(zip(names, key if len(names) != 1 else (key,), strict=True))
        made = job.with_plan(ParallelPlan.model_construct(**{**fixed, **values}))  # of valid values, so unchecked
        return next((place for place, rule in rules if next(rule.problems(made), None) is not None), None)

    return check
