"""What runs what was predicted."""

from __future__ import annotations

from typing import Any

from simplan.prediction import Prediction
from simplan.program.action import format_table
from simplan.runs.run_spec import RunSpec

__all__ = ["run_spec_of"]


def run_spec_of(prediction: Prediction, **options: Any) -> RunSpec:
    """A prediction's plan with its stages and its table, fully decided.

    Args:
        prediction: What is to be run.
        options: Further fields of ``RunSpec``; ``dtype`` is the training's precision unless given.
    """
    job = prediction.job
    precision = job.training.precision
    fields: dict[str, Any] = {
        "name": prediction.name,
        "model": job.model,
        "training": job.training,
        "plan": job.plan,
        "software": job.software,
        "boundaries": prediction.assignment.boundaries,
        "table": tuple(tuple(row) for row in format_table(prediction.table)),
        "predicted_memory_bytes": tuple(memory.device_bytes for memory in prediction.memory),
        "dtype": {"tf32": "fp32", "fp8": "bf16"}.get(precision, precision),
    }
    return RunSpec(**(fields | options))
