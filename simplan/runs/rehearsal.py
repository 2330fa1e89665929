"""What rehearsing one rank of a job recorded. The executor writes it, ``validate.rehearsal`` reads it."""

from __future__ import annotations

import statistics
from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Spec
from simplan.program.program import MemoryCategory
from simplan.runs.measurement import MeasuredCollective, PeakMemory
from simplan.runs.run_spec import RunSpec

__all__ = ["ActionTime", "Rehearsal"]


class ActionTime(Spec):
    """How long one action kept the device.

    Attributes:
        action: Text form, e.g. ``0F1``.
        seconds: In each measured step, without what the fake process group took instead of communicating.
    """

    action: str
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Over the steps."""
        return statistics.median(self.seconds)


class Rehearsal(Spec):
    """One rank of a job, run alone.

    Attributes:
        job: The job.
        rank: Which of its ranks.
        fake: On tensors without data: there are memory and collectives, but no times.
        peak_memory: Of the steps, by the device's own account where it has one.
        peak_by_category: What the rank held at its worst moment, bytes: every tensor, followed one by one.
        peak_action: The action during which that was.
        actions: Times in the order of the rank's row; empty for a fake one.
        collectives: What the rank issued in the last step, in order; nothing of it was carried out.
        environment: Machine, versions, device.
    """

    schema_version: Literal[1] = 1
    job: RunSpec
    rank: Annotated[int, Field(ge=0)]
    fake: bool
    peak_memory: PeakMemory
    peak_by_category: dict[MemoryCategory, int]
    peak_action: str
    actions: tuple[ActionTime, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)
