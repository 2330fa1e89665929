"""What of a prediction is held against a run: of the prediction itself, or of the file that it was written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simplan.prediction import Prediction
from simplan.program.action import format_table
from simplan.program.timeline import Timeline
from simplan.units import GIB
from simplan.validate.measured import predicted_timeline

__all__ = ["Predicted"]


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction as far as a measurement has the same.

    Attributes:
        asked: What must be as it was run, as JSON has it: model, training, plan, software, boundaries of stages, table.
        step_time_s, step_time_interval_s, reference_s: As of ``Prediction``.
        capacity_gib: Memory of one device, GiB; None when that is unknown.
        peak_memory_gib: By rank, by column (allocated, reserved, device), GiB.
        timeline: Spans of the step.
    """

    asked: Mapping[str, Any]
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    reference_s: float | None
    capacity_gib: float | None
    peak_memory_gib: Mapping[int, Mapping[str, float]]
    timeline: Timeline

    @classmethod
    def of(cls, prediction: Prediction | Mapping[str, Any]) -> Predicted:
        """Of a prediction, or of its JSON document.

        Raises:
            KeyError: The document lacks something.
        """
        return _of_object(prediction) if isinstance(prediction, Prediction) else _of_document(prediction)


def _of_object(prediction: Prediction) -> Predicted:
    job, capacity = prediction.job, prediction.capacity_bytes
    return Predicted(
        asked={
            "model": job.model.model_dump(mode="json"),
            "training": job.training.model_dump(mode="json"),
            "plan": job.plan.model_dump(mode="json"),
            "software": job.software.title,
            "stage_boundaries": list(prediction.assignment.boundaries),
            "table": format_table(prediction.table),
        },
        step_time_s=prediction.step_time_s,
        step_time_interval_s=prediction.step_time_interval_s,
        reference_s=prediction.reference_s,
        capacity_gib=None if capacity is None else capacity / GIB,
        peak_memory_gib={
            memory.rank: {
                "allocated": memory.allocated_bytes / GIB,
                "reserved": memory.reserved_bytes / GIB,
                "device": memory.device_bytes / GIB,
            }
            for memory in prediction.memory
        },
        timeline=prediction.timeline,
    )


def _of_document(document: Mapping[str, Any]) -> Predicted:
    inputs = document["inputs"]
    low_s, high_s = document["step_time_interval_s"]
    return Predicted(
        asked={
            **{part: inputs[part] for part in ("model", "training", "plan", "software")},
            "stage_boundaries": document["stage_boundaries"],
            "table": document["table"],
        },
        step_time_s=document["step_time_s"],
        step_time_interval_s=(low_s, high_s),
        reference_s=document.get("reference_s"),
        capacity_gib=document["capacity_gib"],
        peak_memory_gib={rank["rank"]: rank["peak_memory_gib"] for rank in document["ranks"]},
        timeline=predicted_timeline(document),
    )
