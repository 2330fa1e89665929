"""Record of a rehearsal, a dry run of one rank. The executor writes it, ``validate.rehearsal`` reads it."""

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
    """Device time of one action.

    Attributes:
        action: Text form, e.g. ``0F1``.
        seconds: Seconds in each measured step, without the time of the fake process group that replaces communication.
    """

    action: str
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median seconds over the steps."""
        return statistics.median(self.seconds)


class Rehearsal(Spec):
    """Record of a rehearsal: one rank of a job, run alone.

    Attributes:
        fake: True for tensors without data: memory and collectives are recorded, but no times.
        peak_memory: Peak over the steps, as reported by the device if it reports memory.
        peak_by_category: Bytes by category at the rank's peak, from tracking every tensor.
        peak_action: Action during which the peak occurred.
        actions: Times in the order of the rank's row; empty for a fake rehearsal.
        collectives: Communication that the rank issued in the last step, in order; none of it was executed.
        environment: Machine, versions, device.
    """

    schema_version: Literal[2] = 2
    job: RunSpec
    rank: Annotated[int, Field(ge=0)]
    fake: bool
    peak_memory: PeakMemory
    peak_by_category: dict[MemoryCategory, int]
    peak_action: str
    actions: tuple[ActionTime, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)
