"""The job that runs what was predicted."""

from __future__ import annotations

from typing import Any

from simplan.prediction import Prediction
from simplan.program.action import format_table
from simplan.program.job import Job

__all__ = ["job_of"]


def job_of(prediction: Prediction, **options: Any) -> Job:
    """A prediction's plan with its stages and its table, fully decided.

    Args:
        prediction: What is to be run.
        options: Further fields of ``Job``; ``dtype`` is the training's precision unless given.
    """
    precision = prediction.training.precision
    fields: dict[str, Any] = {
        "name": prediction.name,
        "model": prediction.model,
        "training": prediction.training,
        "plan": prediction.plan,
        "software": prediction.software,
        "boundaries": prediction.assignment.boundaries,
        "table": tuple(tuple(row) for row in format_table(prediction.table)),
        "predicted_memory_bytes": tuple(memory.device_bytes for memory in prediction.memory),
        "dtype": {"tf32": "fp32", "fp8": "bf16"}.get(precision, precision),
    }
    return Job(**(fields | options))
