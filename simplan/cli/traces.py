"""Trace files of predictions and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simplan.cost.calibration import Calibration
from simplan.io import write_json
from simplan.predict import simulate_again
from simplan.prediction import Prediction
from simplan.program.measurement import Measurement
from simplan.report.trace import trace_document
from simplan.sim.memory import memory_trace
from simplan.validate.measured import measured_timeline

__all__ = ["predicted_trace", "write_measured_trace", "write_predicted_trace"]


def predicted_trace(prediction: Prediction, calibration: Calibration | None) -> dict[str, Any]:
    """The trace of the predicted step, with memory over time."""
    simulated = simulate_again(prediction, calibration)  # memory over time, on the same clock as the timeline
    program, times = simulated.program, simulated.times
    memory = {rank: list(memory_trace(program, rank, times)) for rank in program.ranks}
    return trace_document(prediction.timeline, prediction.name, memory, program.stands_for)


def write_predicted_trace(file: Path, prediction: Prediction, calibration: Calibration | None) -> None:
    """Writes the trace of the predicted step.

    Raises:
        SpecError: The file cannot be written.
    """
    write_json(file, predicted_trace(prediction, calibration))


def write_measured_trace(file: Path, measurement: Measurement) -> None:
    """Writes the measured step that is nearest to the median.

    Raises:
        SpecError: The file cannot be written.
    """
    write_json(file, trace_document(measured_timeline(measurement), measurement.job.name))
