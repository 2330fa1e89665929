"""Plans that fit only where blocks run again, with as few of them as fit.

The more blocks of every stage run again, the less a step holds and the longer it takes. So of plans that differ in
``recompute_layers`` alone the best is the first that fits. It is found by bisection, once all other plans are known,
and only for those that could still be among the best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from simplan.predict import cost_model
from simplan.predict.build import assign_layers
from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration
from simplan.search.evaluator import Evaluator
from simplan.search.keep import Keep
from simplan.search.question import Question
from simplan.search.space import SearchSpace
from simplan.search.tally import Limits, OnProgress, Tally, rounded
from simplan.spec.plan import ParallelPlan
from simplan.spec.recompute_rules import unmodelled_recompute

__all__ = ["explore_partial", "has_partial"]

_MOST = 32
"""Plans that are tried, the most promising first."""
_LEAST_SHARE = 2 / 3
"""Of a step whose blocks all run again, that of one in which none does: forward is no longer than backward."""
_SURE = 0.99  # of an estimate, which takes all blocks of a stage to be alike
_NEAR = 2  # probes beside a guess before the bisection


class _Waiting(NamedTuple):
    """A plan whose blocks all run again. Order: what its first objective is about, then the same of its time.

    Attributes:
        value: Of the first objective, with as few blocks as may fit.
        about_s: The same of its time.
        least_bytes: With all blocks.
        share: Of the blocks, how many need to run again, at least.
        candidate: The plan.
    """

    value: float
    about_s: float
    least_bytes: int
    share: float
    candidate: Candidate


def has_partial(question: Question, space: SearchSpace) -> bool:
    """Whether a search looks for plans that run some blocks again."""
    one = ParallelPlan(recompute="full", recompute_layers=1)
    return (
        space.recompute_layers == "least"
        and (space.recompute is None or {"none", "full"} <= {*space.recompute})
        and question.cluster.device.memory_bytes is not None
        and not question.software.expert_overlap
        and question.calibration is None
        and question.cluster.cores_per_node is None
        and next(unmodelled_recompute(question.model, one, question.software), None) is None
    )


def explore_partial(
    question: Question,
    space: SearchSpace,
    evaluator: Evaluator,
    limits: Limits,
    keep: Keep,
    tally: Tally,
    on_progress: OnProgress,
) -> int:
    """Tries fewer blocks where all of them are too many and none is too few.

    Args:
        question: What is asked; ``has_partial``.
        space: Its plans.
        evaluator: Of the same question.
        limits: What a plan must keep within; memory is known.
        keep: Takes the best; what it holds already bounds the others.
        tally: What was counted so far.
        on_progress: Called after every plan.

    Returns:
        How many plans were timed besides those of the space.
    """
    search = _Search(question, evaluator, limits, keep)
    whole = Enumeration(space.model_copy(update={"recompute": ("full",)}), question)
    found = 0
    for one in sorted(search.waiting(whole))[:_MOST]:
        if keep.is_hopeless(one.candidate.num_devices, one.least_bytes, _SURE * one.about_s):
            continue
        fitting = search.least(one)
        if fitting is not None and fitting[2] <= (limits.step_time_s or math.inf):
            keep.add(*fitting)
            found += 1
        on_progress(tally, keep)
    return found


class _Search:
    def __init__(self, question: Question, evaluator: Evaluator, limits: Limits, keep: Keep) -> None:
        assert limits.device_bytes is not None
        self._question, self._keep, self._capacity = question, keep, limits.device_bytes
        self._evaluator = evaluator

    def waiting(self, whole: Enumeration) -> Iterator[_Waiting]:
        """Plans whose blocks all run again that may do with fewer, and may then be among the best."""
        keep, evaluator = self._keep, self._evaluator
        for one in whole.candidates(whole.meshes, Counter()):
            if evaluator.average_bytes(one) > self._capacity:
                continue
            all_s = evaluator.least_time_s(one)
            if keep.is_hopeless(one.num_devices, 0, _LEAST_SHARE * all_s):
                continue
            least = evaluator.least_bytes(one)
            if least > self._capacity:
                continue
            plain = one._replace(recompute="none")
            most, none_s = evaluator.least_bytes(plain), evaluator.least_time_s(plain)
            share = max(0.0, (most - self._capacity) / max(1, most - least))
            about_s = none_s + share * max(0.0, all_s - none_s)
            if not keep.is_hopeless(one.num_devices, least, _SURE * about_s):
                value = keep.goal.values(one.num_devices, least, about_s)[0]
                yield _Waiting(value, about_s, least, share, one)

    def least(self, one: _Waiting) -> tuple[Candidate, int, float] | None:
        """With as few blocks as fit, its bytes and its time; None where none need to run again, or all."""
        plan = one.candidate.plan()
        most = self._most_blocks(plan)
        if not one.share and self._fitting(one.candidate._replace(recompute="none")) is not None:
            return None
        low, high, found = 0, most, None
        guess, probes = max(1, min(most - 1, math.ceil(one.share * most))), 0
        while high - low > 1:
            middle = guess if low < guess < high and probes <= _NEAR else (low + high) // 2
            tried = one.candidate._replace(recompute_layers=middle)
            numbers = self._fitting(tried)
            probes += 1
            if numbers is None:
                low, guess = middle, middle + 1
            else:
                high, guess, found = middle, middle - 1, (tried, *numbers)
        return None if found is None else self._whole(*found)

    def _fitting(self, candidate: Candidate) -> tuple[int, float] | None:
        """Its bytes and its time, if it fits."""
        [(size, step_time_s)] = self._evaluator.numbers([candidate], self._capacity)
        return None if step_time_s is None else (size, rounded(step_time_s))

    def _whole(self, candidate: Candidate, size: int, step_time_s: float) -> tuple[Candidate, int, float] | None:
        """With the numbers of ``predict``, if it may be kept; None where it does not fit by these."""
        hopeless = self._keep.is_hopeless(candidate.num_devices, size, step_time_s)
        if hopeless or not self._evaluator.is_truncated(candidate):
            return candidate, size, step_time_s
        [(size, whole_s)] = self._evaluator.numbers([candidate], self._capacity, whole=True)
        return None if whole_s is None else (candidate, size, rounded(whole_s))

    def _most_blocks(self, plan: ParallelPlan) -> int:
        """Blocks of the stage that has most."""
        asked = self._question
        job = asked.job(plan)
        assignment = assign_layers(job, cost_model(job, None))
        last = asked.model.num_blocks
        stages = map(assignment.layer_range, range(assignment.num_stages))
        return max(min(of.stop - 1, last) - max(of.start, 1) + 1 for of in stages)
