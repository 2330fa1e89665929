"""Published runs: the job that was run, and what was measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simplan.accuracy.measured import FALLBACK_FOR, Measured
from simplan.errors import SimplanError, SpecError
from simplan.job import Job


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run of a scenario, with what was measured.

    Attributes:
        id: Name of the scenario, unique over all files.
        job: Job of the run; None if it cannot be predicted.
        software: Section ``software`` as written.
        notes: Assumed values, settings from elsewhere, and features of the run that the prediction lacks.
        reason: Reason for a missing job; else None.
    """

    id: str
    measured: Measured
    job: Job | None
    software: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def fallback_for(self) -> str | None:
        """Framework of the run, if the software profile is that of another one; else None."""
        return self.software.get(FALLBACK_FOR)

    @property
    def known_job(self) -> Job:
        """Job of a run that can be predicted."""
        assert self.job is not None, self.reason
        return self.job

    @property
    def steps_overlap(self) -> bool:
        """True if pipeline ranks start the next step without waiting for each other.

        The step time is then the time of the busiest rank. Else a step lasts from its first start to its last end.
        """
        stated = self.measured.steps_overlap
        return self.known_job.plan.schedule.startswith("zb-") if stated is None else stated


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file and its runs.

    Attributes:
        file: Path as given, or path within a given folder.
        runs: Published runs; None if the file contains other data.
    """

    file: str
    runs: tuple[PublishedRun, ...] | None


def software_section(data: Mapping[str, Any]) -> Any:
    """Section ``software`` of a scenario, with a name as its ``preset``."""
    section = data.get("software", "torch")
    return {"preset": section} if isinstance(section, str) else section


def sentences(error: Exception) -> str:
    """Reason for a missing prediction, on one line; a bug must not hide the results of other runs."""
    if isinstance(error, SpecError):
        return error.sentences
    if isinstance(error, SimplanError):
        return str(error)
    if os.environ.get("SIMPLAN_DEBUG"):
        raise error
    return f"this is a bug of simplan ({type(error).__name__}: {error})"
