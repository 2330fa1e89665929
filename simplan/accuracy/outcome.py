"""Outcome of one published run: prediction and measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simplan.accuracy.run import PublishedRun
from simplan.prediction import MemoryKind


@dataclass(frozen=True, slots=True)
class Predicted:
    """Prediction of a published run.

    Attributes:
        step_time_interval_s: 90% interval of the step time; None if not predicted.
        memory_gib: Peak of the worst rank by kind of figure; empty if only times were predicted.
        memory_interval_gib: 90% intervals of ``memory_gib``.
        oom: True if the run is predicted not to fit; None if unknown.
        flops: FLOPs of a step, including recomputation, with causal attention counted half.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float] | None
    memory_gib: dict[MemoryKind, float]
    memory_interval_gib: dict[MemoryKind, tuple[float, float]]
    oom: bool | None
    flops: float
    software: str


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A run, with its prediction or the reason for a missing one.

    Attributes:
        predicted: Prediction; None if the run was skipped.
        reason: Reason for skipping; None if predicted.
    """

    file: str
    run: PublishedRun
    predicted: Predicted | None
    reason: str | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, minus 1; None if either is missing."""
        measured_s = self.run.measured.step_time_s
        if self.predicted is None or measured_s is None:
            return None
        return self.predicted.step_time_s / measured_s - 1

    @property
    def in_interval(self) -> bool | None:
        """True if the measured step time is inside the interval; None if either is missing."""
        measured_s = self.run.measured.step_time_s
        if self.predicted is None or self.predicted.step_time_interval_s is None or measured_s is None:
            return None
        low_s, high_s = self.predicted.step_time_interval_s
        return low_s <= measured_s <= high_s

    @property
    def memory_kind(self) -> MemoryKind:
        """Kind of the measured peak, the nearer one if unstated; without one, the kind that the framework prints."""
        return next(iter(self.memory_errors or self.run.measured.memory_gib), self.run.measured.memory_kind)

    @property
    def memory_errors(self) -> dict[MemoryKind, float]:
        """Relative error of peak memory by kind; the compared kind comes first."""
        if self.predicted is None or not self.predicted.memory_gib:
            return {}
        measured = self.run.measured
        errors = {kind: self.predicted.memory_gib[kind] / gib - 1 for kind, gib in measured.memory_gib.items()}
        if measured.peak_unstated_gib is None:
            return errors
        nearer = min(errors, key=lambda kind: abs(errors[kind]))
        return {nearer: errors[nearer]}

    def memory_interval_gib(self, kind: MemoryKind) -> tuple[float, float] | None:
        """90% interval of a peak in GiB; None if not predicted."""
        return None if self.predicted is None else self.predicted.memory_interval_gib.get(kind)

    def in_memory_interval(self, kind: MemoryKind) -> bool | None:
        """True if the measured peak of a kind is inside its interval; None if either is missing."""
        gib, interval_gib = self.run.measured.memory_gib.get(kind), self.memory_interval_gib(kind)
        return None if gib is None or interval_gib is None else interval_gib[0] <= gib <= interval_gib[1]

    def to_json(self) -> dict[str, Any]:
        """Outcome as a part of the JSON document."""
        run, predicted, kind = self.run, self.predicted, self.memory_kind
        interval_s = None if predicted is None else predicted.step_time_interval_s
        interval_gib = self.memory_interval_gib(kind)
        return {
            "id": run.id,
            "file": self.file,
            "status": "skipped" if predicted is None else "ok",
            "reason": self.reason,
            "predicted_step_time_s": None if predicted is None else predicted.step_time_s,
            "step_time_interval_s": None if interval_s is None else list(interval_s),
            "measured_step_time_s": run.measured.step_time_s,
            "in_step_time_interval": self.in_interval,
            "step_time_error": self.error,
            "predicted_peak_memory_gib": None if predicted is None else predicted.memory_gib.get(kind),
            "peak_memory_interval_gib": None if interval_gib is None else list(interval_gib),
            "measured_peak_memory_gib": run.measured.memory_gib.get(kind),
            "in_peak_memory_interval": self.in_memory_interval(kind),
            "memory_kind": kind,
            "peak_memory_errors": self.memory_errors,
            "predicted_memory_gib": None if predicted is None else predicted.memory_gib,
            "predicted_oom": None if predicted is None else predicted.oom,
            "measured_oom": run.measured.oom,
            "software": None if predicted is None else predicted.software,
            "quality": run.measured.quality,
            "notes": [] if predicted is None else list(run.notes),
        }
