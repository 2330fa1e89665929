"""Plans that fit only where blocks run again, with as few of them as fit.

The more blocks of every stage run again, the less a step holds and the longer it takes. So of plans that differ in
``recompute_layers`` alone the best is the first that fits. It is found by bisection, once all other plans are known,
and only for those that could still be among the best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict.build import assign_layers, cost_model
from simplan.rules import violations
from simplan.rules.recompute import recompute_layers_modelled, recompute_modelled
from simplan.search.bounds.common import Bounds
from simplan.search.candidates import plan_order
from simplan.search.enumeration import Enumeration
from simplan.search.evaluate import Evaluator
from simplan.search.incumbents import Incumbents
from simplan.search.space import SearchSpace
from simplan.search.statistics import Limits, OnProgress, Statistics, rounded

__all__ = ["explore_partial", "has_partial"]

_MOST = 32
"""Plans that are tried, the most promising first."""
_LEAST_SHARE = 2 / 3
"""Of a step whose blocks all run again, that of one in which none does: forward is no longer than backward."""
_SURE = 0.99  # of an estimate, which takes all blocks of a stage to be alike
_NEAR = 2  # probes beside a guess before the bisection


class _Whole(NamedTuple):
    """A plan whose blocks all run again. Order: what its first objective is about, then the same of its time.

    Attributes:
        value: Of the first objective, with as few blocks as may fit.
        about_s: The same of its time.
        least_bytes: With all blocks.
        share: Of the blocks, how many need to run again, at least.
        order: Of the plan, as of ``plan_order``.
        plan: The plan.
    """

    value: float
    about_s: float
    least_bytes: int
    share: float
    order: tuple[Any, ...]
    plan: ParallelPlan


def has_partial(job: Job, space: SearchSpace, calibration: Calibration | None) -> bool:
    """Whether a search looks for plans that run some blocks again."""
    one = ParallelPlan(recompute="full", recompute_layers=1)
    return (
        space.recompute_layers == "least"
        and (space.recompute is None or {"none", "full"} <= {*space.recompute})
        and job.cluster.device.memory_bytes is not None
        and not job.software.expert_overlap
        and calibration is None
        and job.cluster.cores_per_node is None
        and not violations(job.with_plan(one), (recompute_modelled, recompute_layers_modelled))
    )


def explore_partial(
    job: Job,
    space: SearchSpace,
    bounds: Bounds,
    evaluator: Evaluator,
    limits: Limits,
    incumbents: Incumbents,
    on_progress: OnProgress,
    statistics: Statistics,
) -> int:
    """Tries fewer blocks where all of them are too many and none is too few.

    Args:
        job: What is asked; ``has_partial``.
        space: Its plans.
        bounds, evaluator: Of the same job.
        limits: What a plan must keep within; memory is known.
        incumbents: Takes the best; what it holds already bounds the others.
        on_progress: Called after every plan.
        statistics: Given to it.

    Returns:
        How many plans were timed besides those of the space.
    """
    capacity = limits.device_bytes
    assert capacity is not None
    enumeration = Enumeration(space.model_copy(update={"recompute": ("full",)}), job)
    found = 0
    for one in sorted(_whole(enumeration, bounds, incumbents, capacity))[:_MOST]:
        if incumbents.is_hopeless(one.plan.num_devices, one.least_bytes, _SURE * one.about_s):
            continue
        fitting = _fewest_blocks(job, one, evaluator, capacity)
        if fitting is not None and fitting[2] <= (limits.step_time_s or math.inf):
            incumbents.add(*fitting)
            found += 1
        on_progress(statistics, incumbents)
    return found


def _whole(enumeration: Enumeration, bounds: Bounds, incumbents: Incumbents, capacity: int) -> Iterator[_Whole]:
    """Plans whose blocks all run again that may do with fewer, and may then be among the best."""
    num_devices = enumeration.num_devices
    for table in enumeration.tables(Counter()):
        of_all = bounds.of(table, capacity)
        fits = np.flatnonzero(of_all.device_bytes <= capacity)
        least_s = of_all.step_time_s[fits]
        near = [not incumbents.is_hopeless(num_devices, 0, _LEAST_SHARE * s) for s in least_s.tolist()]
        fits = fits[np.array(near, np.bool_)]
        none = bounds.of(table.take(fits).with_value("recompute", "none"))
        least, most = of_all.device_bytes[fits], none.device_bytes
        shares = np.maximum(0.0, (most - capacity) / np.maximum(1, most - least))
        about_s = none.step_time_s + shares * np.maximum(0.0, of_all.step_time_s[fits] - none.step_time_s)
        for row, size, share, seconds in zip(
            fits.tolist(), least.tolist(), shares.tolist(), about_s.tolist(), strict=True
        ):
            if not incumbents.is_hopeless(num_devices, size, _SURE * seconds):
                plan, value = table.plan(row), incumbents.goal.values(num_devices, size, seconds)[0]
                yield _Whole(value, seconds, size, share, plan_order(plan), plan)


def _fewest_blocks(
    job: Job, one: _Whole, evaluator: Evaluator, capacity: int
) -> tuple[ParallelPlan, int, float] | None:
    """With as few blocks as fit, its bytes and its time; None where none need to run again, or all."""

    def fitting(update: dict[str, object]) -> tuple[ParallelPlan, int, float] | None:
        plan = one.plan.model_copy(update=update)
        [(size, step_time_s)] = evaluator.numbers([plan], capacity)
        return None if step_time_s is None else (plan, size, rounded(step_time_s))

    most = _most_blocks(job.with_plan(one.plan))
    if not one.share and fitting({"recompute": "none"}) is not None:
        return None
    low, high, found = 0, most, None
    guess, probes = max(1, min(most - 1, math.ceil(one.share * most))), 0
    while high - low > 1:
        middle = guess if low < guess < high and probes <= _NEAR else (low + high) // 2
        tried = fitting({"recompute_layers": middle})
        probes += 1
        if tried is None:
            low, guess = middle, middle + 1
        else:
            high, guess, found = middle, middle - 1, tried
    return found


def _most_blocks(job: Job) -> int:
    """Blocks of the stage that has most."""
    assignment = assign_layers(job, cost_model(job, None))
    last = job.model.num_blocks
    stages = map(assignment.layer_range, range(assignment.num_stages))
    return max(min(of.stop - 1, last) - max(of.start, 1) + 1 for of in stages)
