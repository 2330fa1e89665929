"""Plans next to each other: step time, its parts and memory of each, for lessons and for comparisons of scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.results.plan import Headline, headline_of_prediction, plan_result
from simplan.errors import SpecError
from simplan.prediction import RankMemory
from simplan.report.text import split_parts


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """One plan among others.

    Attributes:
        name: Label of the plan.
        refused: Error of a plan without a prediction; empty otherwise, and the fields below are set.
        headline: Step time and memory with intervals, verdict on memory, throughput and MFU; None for a refused plan.
        num_devices: Number of devices.
        memory: Memory of the peak-memory rank; None for a refused plan.
        split_s: Seconds of the step of the rank with the longest compute time, by part; they sum to the step.
    """

    name: str
    refused: str = ""
    headline: Headline | None = None
    num_devices: int = 0
    memory: RankMemory | None = None
    split_s: dict[str, float] = field(default_factory=dict)


def compared_plans(texts: Sequence[tuple[str, str]], calibrated_at: int = 0) -> tuple[ComparedPlan, ...]:
    """Predicts several scenarios.

    Args:
        texts: Name and YAML of each scenario.
        calibrated_at: Modification time of this machine's calibration, a cache key.
    """
    return tuple(compared_plan(name, text, calibrated_at) for name, text in texts)


def compared_plan(name: str, text: str, calibrated_at: int) -> ComparedPlan:
    """Predicts one scenario; an error becomes ``ComparedPlan.refused``."""
    try:
        result = plan_result(text, calibrated_at)
    except SpecError as error:
        return ComparedPlan(name, "; ".join(problem.sentence() for problem in error.problems))
    prediction = result.prediction
    index = next(i for i, memory in enumerate(prediction.memory) if memory.rank == result.busiest)
    return ComparedPlan(
        name,
        headline=headline_of_prediction(prediction),
        num_devices=prediction.job.cluster.num_devices,
        memory=prediction.worst_memory,
        split_s=dict(split_parts(prediction.splits[index])),
    )
