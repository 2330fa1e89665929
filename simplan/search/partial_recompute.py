"""Search for the fewest recomputed blocks per stage with which a plan fits.

More recomputed blocks mean less memory and longer steps. So among plans that differ only in ``recompute_layers``, the
best has the fewest recomputed blocks that fit. Bisection finds it, only for plans that could be among the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict.build import assign_layers, cost_model
from simplan.rules import violations
from simplan.rules.recompute import recompute_layers_modelled, recompute_modelled
from simplan.search.candidates import plan_order
from simplan.search.evaluation.evaluator import Evaluator
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.explore import Exploration, OnProgress
from simplan.search.incumbents import Goal, Incumbents
from simplan.search.space import SearchSpace
from simplan.search.statistics import rounded

_MAX_CANDIDATES = 32
"""Maximum number of plans to try, most promising first."""
_MIN_SHARE = 2 / 3
"""Minimum step time without recomputation over step time with full: forward takes no longer than backward."""
_EQUAL_BLOCKS_FACTOR = 0.99  # factor for an estimate that assumes equal blocks in a stage
_MAX_ROWS = 32_768  # bounded at a time, for limited memory
_NUM_PROBES = 2  # probes next to a guess before the bisection


class _Whole(NamedTuple):
    """A plan with full recomputation, sorted by estimated first objective, then by estimated step time.

    Attributes:
        value: Estimated first objective with the fewest recomputed blocks that may fit.
        about_s: Estimated step time with the fewest recomputed blocks that may fit.
        least_bytes: Lower bound on memory with all blocks recomputed.
        share: Estimated fraction of blocks that must be recomputed.
        all_s: Estimated seconds that recomputing all blocks adds to the step.
    """

    value: float
    about_s: float
    least_bytes: int
    share: float
    order: tuple[Any, ...]
    plan: ParallelPlan
    all_s: float


def _has_partial(job: Job, space: SearchSpace, calibration: Calibration | None) -> bool:
    """True if a search also tries plans that recompute only some blocks."""
    partial_plan = ParallelPlan(recompute="full", recompute_layers=1)
    return (
        space.recompute_layers == "least"
        and (space.recompute is None or {"none", "full"} <= {*space.recompute})
        and not job.software.expert_overlap
        and calibration is None
        and job.cluster.cores_per_node is None
        and not violations(job.with_plan(partial_plan), (recompute_modelled, recompute_layers_modelled))
    )


def search_partial_recompute(
    exploration: Exploration,
    space: SearchSpace,
    calibration: Calibration | None,
    incumbents: Incumbents,
    workers: WorkerPool,
    on_progress: OnProgress,
) -> int:
    """Try fewer recomputed blocks for plans that fit with all blocks recomputed and not with none.

    Args:
        exploration: The exploration of plans that recompute all or no blocks, with their bounds.
        incumbents: Best plans, updated; they also prune candidates.
        workers: Workers of the search; each call is the bisection for one plan.
        on_progress: See ``Exploration``.

    Returns:
        Number of plans timed in addition to those of the space.
    """
    job, capacity = exploration.job, exploration.capacity_bytes
    if capacity is None or not _has_partial(job, space, calibration):
        return 0
    promising = sorted(_whole(exploration, incumbents, capacity))[:_MAX_CANDIDATES]
    num_found = 0

    def is_hopeless(whole: _Whole) -> bool:
        return incumbents.is_hopeless(whole.plan.num_devices, whole.least_bytes, _EQUAL_BLOCKS_FACTOR * whole.about_s)

    ordered = enumerate(sorted(_in_stages(job, candidate, incumbents.goal) for candidate in promising))
    near = ((number, whole) for number, whole in ordered if not is_hopeless(whole))
    calls = (((number, whole), (exploration.evaluator, whole, capacity)) for number, whole in near)
    for (number, whole), fitting in workers.each(_fewest_blocks, calls):
        if is_hopeless(whole):  # since a plan was found meanwhile
            continue
        if fitting is not None and fitting[2] <= (space.max_step_time_s or math.inf):
            incumbents.add(*fitting, exploration.options)
            num_found += 1
        on_progress("looking for the fewest recomputed blocks", number + 1, len(promising))
    return num_found


def _whole(exploration: Exploration, incumbents: Incumbents, capacity: int) -> Iterator[_Whole]:
    """Yield plans with full recomputation that may fit with fewer recomputed blocks and be among the best."""
    num_devices = exploration.enumeration.num_devices
    whole = exploration.bounded_with("recompute", "full")
    if whole is None:
        return
    rows, row_bytes, row_s = whole
    near = [not incumbents.is_hopeless(num_devices, 0, _MIN_SHARE * s) for s in row_s.tolist()]
    near_rows = np.flatnonzero(near)
    for start in range(0, len(near_rows), _MAX_ROWS):
        here = near_rows[start : start + _MAX_ROWS]
        full, least, full_s = rows.take(here), row_bytes[here], row_s[here]
        none = exploration.evaluator.bounds.of(full.with_value("recompute", "none"))
        shares = np.maximum(0.0, (none.device_bytes - capacity) / np.maximum(1, none.device_bytes - least))
        all_s = np.maximum(0.0, full_s - none.step_time_s)
        columns = least.tolist(), shares.tolist(), (none.step_time_s + shares * all_s).tolist(), all_s.tolist()
        for row, (size, share, about_s, more_s) in enumerate(zip(*columns, strict=True)):
            if not incumbents.is_hopeless(num_devices, size, _EQUAL_BLOCKS_FACTOR * about_s):
                plan, value = full.plan(row), incumbents.goal.values(num_devices, size, about_s)[0]
                yield _Whole(value, about_s, size, share, plan_order(plan), plan, more_s)


def _in_stages(job: Job, whole: _Whole, goal: Goal) -> _Whole:
    """The plan with a better estimate: every stage recomputes one block at least, and the largest one has few."""
    share = max(whole.share, 1 / _most_blocks(job.with_plan(whole.plan)))
    about_s = whole.about_s + (share - whole.share) * whole.all_s
    value = goal.values(whole.plan.num_devices, whole.least_bytes, about_s)[0]
    return whole._replace(value=value, about_s=about_s)


def _fewest_blocks(evaluator: Evaluator, whole: _Whole, capacity: int) -> tuple[ParallelPlan, int, float] | None:
    """The plan with the fewest recomputed blocks that fit, its bytes and its seconds.

    Returns None if the plan fits without recomputation, or only with all blocks recomputed.
    """

    def fitting(update: dict[str, object]) -> tuple[ParallelPlan, int, float] | None:
        plan = whole.plan.model_copy(update=update)
        size, step_time_s = evaluator.numbers(plan, capacity)
        return None if step_time_s is None else (plan, size, rounded(step_time_s))

    max_blocks = _most_blocks(evaluator.job.with_plan(whole.plan))
    if not whole.share and fitting({"recompute": "none"}) is not None:
        return None
    low, high, fewest = 0, max_blocks, None
    guess, probes = max(1, min(max_blocks - 1, math.ceil(whole.share * max_blocks))), 0
    while high - low > 1:
        middle = guess if low < guess < high and probes <= _NUM_PROBES else (low + high) // 2
        tried = fitting({"recompute_layers": middle})
        probes += 1
        if tried is None:
            low, guess = middle, middle + 1
        else:
            high, guess, fewest = middle, middle - 1, tried
    return fewest


def _most_blocks(job: Job) -> int:
    """Number of blocks in the largest stage."""
    assignment = assign_layers(job, cost_model(job, None))
    return max(assignment.stage_layers(job.model.num_last_layers))
