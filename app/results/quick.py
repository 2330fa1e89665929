"""Step time and memory alone, in milliseconds, by what a search uses; equal to ``predict`` up to rounding."""

from __future__ import annotations

from typing import NamedTuple

from simplan.scenario import Scenario
from simplan.search.candidate import Candidate
from simplan.search.question import Question

__all__ = ["Quick", "quick"]


class Quick(NamedTuple):
    """The two numbers.

    Attributes:
        step_time_s: Time of one optimizer step.
        device_bytes: Device memory of the rank that needs most.
    """

    step_time_s: float
    device_bytes: int


def quick(asked: Scenario) -> Quick | None:
    """The numbers of a plan that a search knows; None for others, which have to be simulated.

    Raises:
        SpecError: A price cannot be had.
    """
    from simplan.search.fast import FastEvaluator, covers_job  # brings numba

    plan = asked.job.plan
    candidate = Candidate(**{name: getattr(plan, name) for name in Candidate._fields})
    question = Question(asked.job.model, asked.job.cluster, asked.job.training, asked.job.software)
    if candidate.plan() != plan or not covers_job(question):
        return None
    evaluator = FastEvaluator(question)
    if not evaluator.covers(candidate):
        return None
    [step_time_s], [device_bytes] = evaluator.step_times_s([candidate]), evaluator.device_bytes([candidate])
    return Quick(step_time_s, device_bytes)
