"""Suite: predictions and measurements of many scenarios on one device, with overall errors."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from simplan.base import Natural, Spec
from simplan.units import GIB

Measure = Literal["step_time", "memory"]
"""Compared measure: step time, or peak memory of tensors."""

MEASURES: tuple[Measure, ...] = ("step_time", "memory")


class SuiteCase(Spec):
    """Prediction and measurement of one scenario.

    Attributes:
        name: File name of the scenario, without suffix.
        digest: Digest of the file; a changed scenario is measured again.
        kind: ``run`` for a full run, ``rehearsal`` for the rehearsal of one rank.
        failure: Reason for a missing measurement; None if there is one.
        predicted_step_time_s: Predicted from the calibration, or from the catalog if there is none.
        measured_step_time_s: Median of the steady steps. For a rehearsal, the step of the job with measured compute and
            modeled communication.
        spread: Half the distance of the 10th and 90th percentile of the steps, relative to the median; None for a
            rehearsal.
        predicted_allocated_bytes, measured_allocated_bytes: Peak of tensors on the peak-memory (or rehearsed) rank.
        mfu: Measured MFU; None if the device peak is unknown, and for rehearsals.
    """

    name: str
    digest: str
    kind: Literal["run", "rehearsal"]
    failure: str | None = None
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    spread: float | None = None
    predicted_allocated_bytes: Natural | None = None
    measured_allocated_bytes: Natural | None = None
    mfu: float | None = None

    def error(self, measure: Measure) -> float | None:
        """(predicted - measured) / measured; None if either is missing."""
        if measure == "step_time":
            return _error(self.predicted_step_time_s, self.measured_step_time_s)
        return _error(self.predicted_allocated_bytes, self.measured_allocated_bytes)


class Errors(Spec):
    """Signed relative errors of several cases.

    Attributes:
        num: Number of cases.
        mean_absolute: Mean absolute error.
        bias: Mean signed error.
        worst: Largest error by absolute value, with its sign.
        worst_case: Name of the case with the largest error.
    """

    num: Natural
    mean_absolute: float
    bias: float
    worst: float
    worst_case: str


class Suite(Spec):
    """Results of a suite.

    Attributes:
        environment: Machine, device and versions.
        calibration_file: Calibration used for predictions, in the folder of the report; None for the catalog alone.
        cases: Cases, sorted by name.
        not_reached: Names of cases that the time limit skipped.
    """

    schema_version: Literal[1] = 1
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)
    calibration_file: str | None = None
    cases: tuple[SuiteCase, ...] = ()
    not_reached: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> tuple[SuiteCase, ...]:
        """Cases of one kind."""
        return tuple(case for case in self.cases if case.kind == kind)

    def to_json(self) -> dict[str, Any]:
        """As a JSON document, with errors by case and in all."""
        document = self.model_dump(mode="json")
        for case, written in zip(self.cases, document["cases"], strict=True):
            written["error"] = {measure: case.error(measure) for measure in MEASURES}
        overall = {
            kind: {
                measure: None if (errors := errors_of(self.of_kind(kind), measure)) is None else errors.model_dump()
                for measure in MEASURES
            }
            for kind in ("run", "rehearsal")
        }
        return {**document, "kind": "suite", "overall": overall}


def errors_of(cases: Iterable[SuiteCase], measure: Measure) -> Errors | None:
    """Errors of the cases with a prediction and a measurement; None if there are no such cases."""
    errors = [(value, case.name) for case in cases if (value := case.error(measure)) is not None]
    if not errors:
        return None
    worst, worst_case = max(errors, key=lambda pair: abs(pair[0]))
    return Errors(
        num=len(errors),
        mean_absolute=statistics.fmean(abs(value) for value, _ in errors),
        bias=statistics.fmean(value for value, _ in errors),
        worst=worst,
        worst_case=worst_case,
    )


def case_of_run(name: str, digest: str, document: Mapping[str, Any]) -> SuiteCase:
    """Make the case of a scenario, given its name and digest, from the output of ``simplan run --json``."""
    predicted, measured = document["prediction"], document["measurement"]
    rank = max(measured["ranks"], key=lambda rank: rank["peak_memory"]["allocated_bytes"] or 0)
    of_rank = next(other for other in predicted["ranks"] if other["rank"] == rank["rank"])
    step_time_s, mfu = measured["step_time_s"], predicted["mfu"]
    return SuiteCase(
        name=name,
        digest=digest,
        kind="run",
        predicted_step_time_s=predicted["step_time_s"],
        measured_step_time_s=step_time_s,
        spread=measured["spread"],
        predicted_allocated_bytes=round(of_rank["peak_memory_gib"]["allocated"] * GIB),
        measured_allocated_bytes=rank["peak_memory"]["allocated_bytes"],
        mfu=None if mfu is None else mfu * predicted["step_time_s"] / step_time_s,
    )


def case_of_rehearsal(name: str, digest: str, document: Mapping[str, Any]) -> SuiteCase:
    """Make a case from the output of ``simplan rehearse --json``; see ``case_of_run``."""
    compared = document["comparison"]
    rehearsed = compared["rehearsed"]
    allocated = next((row for row in compared["peaks"] if row["name"] == "allocated"), None)
    return SuiteCase(
        name=name,
        digest=digest,
        kind="rehearsal",
        predicted_step_time_s=compared["predicted_step_time_s"],
        measured_step_time_s=None if rehearsed is None else rehearsed["step_time_s"],
        predicted_allocated_bytes=None if allocated is None else allocated["predicted_bytes"],
        measured_allocated_bytes=None if allocated is None else allocated["measured_bytes"],
    )


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else (predicted - measured) / measured
