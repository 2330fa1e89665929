"""The section ``measured`` of a scenario: what a run of it took, who published that, and what they left open."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from simplan.base import Line, NonNegative, Spec
from simplan.prediction import MemoryKind
from simplan.units import GIB

MeasuredValue = Annotated[float, Field(ge=1e-6, le=1e12, allow_inf_nan=False)]
"""A measured value; errors relative to a smaller one would be infinite."""
FALLBACK_FOR = "fallback_for"
"""Key of ``software`` that names the framework of a measured run in whose place the profile is taken."""
Lines = Annotated[tuple[Line, ...], Field(strict=False)]


class Measured(Spec):
    """Measured figures of a run, and their origin; None for figures that the source does not print."""

    source: Line = Field(description="repository:path@commit, or paper and table")
    version: Line | None = Field(None, description="version, container, commit or date of the software")
    step_time_s: MeasuredValue | None = Field(None, description="one optimizer step, in seconds")
    derived_step_time: bool = Field(False, description="the step time was computed from a published throughput")
    steps_overlap: bool | None = Field(
        None,
        description=(
            "pipeline ranks start the next step without waiting for each other, so that the step time is that of the "
            "busiest rank; default: with zero-bubble schedules"
        ),
    )
    tokens_per_s_per_device: MeasuredValue | None = Field(None, description="published throughput over all devices")
    samples_per_s_per_device: MeasuredValue | None = Field(None, description="the same in images or sequences")
    peak_allocated_gib: MeasuredValue | None = Field(
        None, description="torch's max_memory_allocated, the largest of all ranks"
    )
    peak_allocated_gb: MeasuredValue | None = Field(None, description="the same in 1e9 bytes")
    peak_reserved_gib: MeasuredValue | None = Field(
        None, description="torch's max_memory_reserved, the largest of all ranks"
    )
    peak_unstated_gib: MeasuredValue | None = Field(
        None,
        description="peak of torch, of which the source does not say whether it is allocated or reserved: the nearer",
    )
    peak_memory_gib: MeasuredValue | None = Field(None, description="memory in use on the device, of the fullest rank")
    memory_kind: MemoryKind = Field("allocated", description="figure that the framework prints, for a run without one")
    oom: bool = Field(False, description="the run ended out of memory")
    model_tflops_per_device: MeasuredValue | None = Field(None, description="model TFLOP/s by the source's own formula")
    mfu: NonNegative | None = Field(None, description="MFU by the source's own formula")
    num_parameters: Annotated[int, Field(ge=1, le=10**15)] | None = Field(None, description="parameters, as printed")
    assumed: Lines = Field((), description="dotted keys that the source does not print")
    sources: dict[str, Line] = Field(
        default_factory=dict, description="by dotted key, where a setting stands that the source does not print"
    )
    notes: Lines = Field((), description="sentences on what the prediction lacks or has in place of the run")
    quality: Literal["good", "assumed", "noisy", "inconsistent"] = Field(
        "good",
        description=(
            "assumed: a key that sets the amount of work is; noisy: the source warns of large variation; inconsistent: "
            "figures contradict each other"
        ),
    )

    @model_validator(mode="after")
    def _no_step_out_of_memory(self) -> Measured:
        if self.oom and self.step_time_s is not None:
            raise ValueError("step_time_s must be left out where oom is true: the run ended out of memory")
        return self

    @property
    def memory_gib(self) -> dict[MemoryKind, float]:
        """Measured peaks by kind, most reliable kind first."""
        gb = self.peak_allocated_gb
        peaks: dict[MemoryKind, float | None] = {
            "allocated": (self.peak_allocated_gib or self.peak_unstated_gib) if gb is None else gb * 10**9 / GIB,
            "reserved": self.peak_reserved_gib or self.peak_unstated_gib,
            "device": self.peak_memory_gib,
        }
        return {kind: peak for kind, peak in peaks.items() if peak is not None}
