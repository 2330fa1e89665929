"""Run specification of a predicted plan."""

from __future__ import annotations

from typing import Any

from simplan.prediction import Prediction
from simplan.program.action import format_table
from simplan.runs.run_spec import RunSpec

__all__ = ["run_spec_of"]


def run_spec_of(prediction: Prediction, **options: Any) -> RunSpec:
    """Make the ``RunSpec`` of a prediction, with stages and action table fixed.

    Args:
        prediction: Prediction to run.
        options: Further fields of ``RunSpec``; ``dtype`` defaults to the training precision (tf32: fp32, fp8: bf16).
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
