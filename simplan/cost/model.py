"""Cost models: estimates in seconds, with their provenance, for every kind of work in a Program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from simplan.program.program import Communication, HostCopy, HostWait, LayerWork


class Provenance(StrEnum):
    """Sources of a cost estimate, most reliable first."""

    CALIBRATED = "calibrated"
    PUBLISHED = "published"
    DATASHEET = "datasheet"
    EXTRAPOLATED = "extrapolated"


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Cost estimate: the time of one item of work that runs alone.

    Attributes:
        relative_std: Relative standard deviation of the estimate.
        formula: The formula with numbers filled in.
        least_s: Seconds that the bytes of a transfer need at datasheet bandwidth; 0 for other work, or unknown.
    """

    seconds: float
    provenance: Provenance
    relative_std: float
    formula: str
    least_s: float = 0.0


class CostModel(Protocol):
    """Estimates the time of work that runs alone. Equal work has equal estimates, so callers may cache them."""

    @property
    def overlap_slowdown(self) -> float:
        """Overlap slowdown: fraction of compute throughput lost while communication overlaps, below 1."""

    def compute(self, work: LayerWork) -> CostEstimate:
        """Returns the time of one phase of one layer on one device."""

    def communication(self, communication: Communication) -> CostEstimate:
        """Returns the time of a collective or P2P transfer once all its members are ready."""

    def host_copy(self, copy: HostCopy) -> CostEstimate:
        """Returns the time of a copy between a device and its host."""

    def host_wait(self, wait: HostWait) -> CostEstimate:
        """Returns the time of a wait of the device for its host."""
