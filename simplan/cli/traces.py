"""Trace files of predictions and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simplan.io import write_json
from simplan.predict import Simulated
from simplan.prediction import Prediction
from simplan.report.trace import trace_document
from simplan.runs.measurement import Measurement
from simplan.sim.memory import memory_trace
from simplan.validate.measured import measured_timeline

__all__ = ["predicted_trace", "write_measured_trace", "write_predicted_trace"]


def predicted_trace(prediction: Prediction, simulated: Simulated) -> dict[str, Any]:
    """The trace of the predicted step, with memory over time.

    Args:
        prediction: What is predicted.
        simulated: The step behind it, whose clock is that of the prediction's timeline.
    """
    program, times = simulated.program, simulated.times
    memory = {rank: list(memory_trace(program, rank, times)) for rank in program.ranks}
    return trace_document(prediction.timeline, prediction.name, memory, program.stands_for)


def write_predicted_trace(file: Path, prediction: Prediction, simulated: Simulated) -> None:
    """Writes the trace of the predicted step.

    Raises:
        SpecError: The file cannot be written.
    """
    write_json(file, predicted_trace(prediction, simulated))


def write_measured_trace(file: Path, measurement: Measurement) -> None:
    """Writes the measured step that is nearest to the median.

    Raises:
        SpecError: The file cannot be written.
    """
    write_json(file, trace_document(measured_timeline(measurement), measurement.job.name))
